// The page /docs: the endpoints of /openapi.json with their options, to search and to jump to.
import { count, Empty, html, render, useEffect, useMemo, useState } from "./ui.js";

const SAME = "x-modelctl-same-as", UNUSED = "x-modelctl-unused";
const BOUNDS = [
  ["minimum", "from", ""], ["exclusiveMinimum", "above", ""], ["maximum", "to", ""], ["exclusiveMaximum", "below", ""],
  ["minItems", "at least", " entries"], ["maxItems", "at most", " entries"],
  ["minLength", "at least", " characters"], ["maxLength", "at most", " characters"],
];

// What a value may be, in words.
function allowed(schema) {
  if (schema.anyOf) return [...new Set(schema.anyOf.filter((part) => part.type !== "null").map(allowed))].join(" or ");
  if (schema.enum) return schema.enum.filter((value) => value !== null).join(", ");
  if ("const" in schema) return String(schema.const);
  const kind = [schema.type].flat().filter((name) => name && name !== "null").join(" or ") || "anything";
  const of = kind === "array" && schema.items?.type ? ` of ${schema.items.type}s` : "";
  return [kind + of, ...BOUNDS.filter(([name]) => name in schema)
    .map(([name, word, unit]) => `${word} ${count(schema[name])}${unit}`)].join(" ");
}

// A text in which `this` is code.
const Text = ({ children }) => children.split("`").map((part, at) => at % 2 ? html`<code>${part}</code>` : part);

function endpointsOf(api) {
  return Object.entries(api.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, described]) => {
    const body = described.requestBody?.content["application/json"].schema;
    const options = Object.entries(body?.properties || {}).map(([name, schema]) =>
      ({ name, schema, text: schema.description, required: body.required.includes(name), place: "" }));
    const parameters = (described.parameters || []).map((one) =>
      ({ name: one.name, schema: one.schema, text: one.description, required: one.required, place: one.in }));
    const answers = Object.entries(described.responses).map(([status, answer]) =>
      [status, answer.$ref ? api.components.responses[answer.$ref.split("/").at(-1)].description : answer.description]);
    return { id: `${method}-${path}`, path, method: method.toUpperCase(), tag: described.tags[0], summary: described.summary,
      about: described.description, options: [...parameters, ...options], answers };
  }));
}

// The endpoints that hold all the words: in what is said of them, or with the options that do.
function found(endpoints, words) {
  if (!words.length) return endpoints;
  const holds = (...texts) => words.every((word) => texts.join(" ").toLowerCase().includes(word));
  return endpoints.map((one) => {
    if (holds(one.method, one.path, one.summary, one.about)) return one;
    const options = one.options.filter((option) => holds(option.name, option.text, one.path));
    return options.length ? { ...one, options, matched: true } : null;
  }).filter(Boolean);
}

function Options({ options, name }) {
  return html`<table aria-label=${name}><thead><tr><th>Option</th><th>Meaning</th></tr></thead><tbody>${options.map((one) => html`<tr key=${one.place + one.name}>
    <td><code>${one.name}</code><small>${one.required ? "required, " : ""}${allowed(one.schema)}${one.place ? `, in the ${one.place}` : ""}${
      "default" in one.schema ? `, default ${JSON.stringify(one.schema.default)}` : ""}</small></td>
    <td><${Text}>${one.text}<//></td></tr>`)}</tbody></table>`;
}

function Folded({ title, options, open }) {
  return options.length > 0 && html`<details open=${open}><summary>${options.length} ${title}</summary><${Options} options=${options} name=${title} /></details>`;
}

function Endpoint({ one }) {
  const kind = (option) => option.schema[SAME] ? "same" : option.schema[UNUSED] ? "unused" : "own";
  const of = (wanted) => one.options.filter((option) => kind(option) === wanted);
  const [good, ...errors] = one.answers;
  const few = one.options.length < 8;
  return html`<article class="card" id=${one.id} tabindex="-1" aria-labelledby=${`${one.id} title`}>
    <h3 id=${`${one.id} title`}><span class="method">${one.method}</span> ${one.path}</h3>
    <p>${one.summary} <${Text}>${one.about}<//></p>
    ${few && one.options.length ? html`<${Options} options=${one.options} name=${`Options of ${one.path}`} />` : html`
      <${Folded} title="options" options=${of("own")} open=${one.matched} />
      <${Folded} title="other names of options" options=${of("same")} open=${one.matched} />
      <${Folded} title="options that change nothing" options=${of("unused")} open=${one.matched} />`}
    <p><b>Answer:</b> <${Text}>${good[1]}<//></p>
    <details><summary>Errors: ${errors.map(([status]) => status === "default" ? "others" : status).join(", ")}</summary>
      <dl class="facts">${errors.map(([status, text]) => html`<dt>${status === "default" ? "others" : status}</dt><dd><${Text}>${text}<//></dd>`)}</dl></details>
  </article>`;
}

function jump(id) {
  const place = document.getElementById(id);
  place?.scrollIntoView();
  place?.focus({ preventScroll: true });
}

function Api({ api }) {
  const [wanted, setWanted] = useState("");
  const endpoints = useMemo(() => endpointsOf(api), []);
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = found(endpoints, words);
  const tags = api.tags.map(({ name }) => [name, shown.filter((one) => one.tag === name)]).filter(([, of]) => of.length);
  useEffect(() => {
    const go = () => jump(decodeURIComponent(location.hash.slice(1)));
    go();
    addEventListener("hashchange", go);
    return () => removeEventListener("hashchange", go);
  }, []);
  const list = tags.map(([tag, of]) => html`<p class="tag">${tag}</p><ul aria-label=${tag}>${of.map((one) => html`<li key=${one.id}>
    <a href=${`#${encodeURIComponent(one.id)}`} onClick=${() => jump(one.id)}><b>${one.method}</b> ${one.path}</a></li>`)}</ul>`);
  return html`<nav aria-label="Endpoints">
      <label class="find">Find an endpoint or an option
        <input type="search" value=${wanted} onInput=${(event) => setWanted(event.target.value)} /></label>
      <p class="small faint" role="status">${words.length ? `${shown.length} of ${endpoints.length} endpoints` : ""}</p>
      <details open=${matchMedia("(min-width: 60rem)").matches}><summary>Endpoints</summary>${list}</details></nav>
    <div class="endpoints"><h2>HTTP API</h2><p><${Text}>${api.info.description}<//> <a href="/openapi.json">openapi.json</a> describes all for programs.</p>
      ${tags.map(([tag, of]) => html`<section key=${tag} aria-label=${tag}><h2>${tag}</h2>
        ${of.map((one) => html`<${Endpoint} key=${one.id + wanted} one=${one} />`)}</section>`)}
      ${!shown.length && html`<${Empty}>No endpoint and no option is called so.<//>`}</div>`;
}

function show(content) {
  render(html`<header class="top"><div><h1><a href="/">modelctl</a></h1></div></header><main class="api">${content}</main>`, document.getElementById("app"));
}

show(html`<p class="none">Reading …</p>`);
try {
  show(html`<${Api} api=${await (await fetch("/openapi.json")).json()} />`);
} catch {
  show(html`<p class="error">The gateway does not answer. Load this page again.</p>`);
}
