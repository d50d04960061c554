// Everything about one model: #/models/NAME, where NAME is its own name or an alias.

import { bytes, Copy, count, Empty, Facts, html, joined, reading, Section, span, speed, State, sum, useAnswer, useNow, useState } from "../ui.js";
import { models } from "../live.js";
import { call } from "../session.js";
import { Log } from "../log.js";
import { EventList, ModelOrders, nearest, on, Reason } from "../model_parts.js";

const DETAILS_MS = 5000;
const EVENTS = 100;
const seconds = (s) => s === null || s === undefined ? "–" : s < 10 ? `${Number(s.toPrecision(2))} s` : span(s);
const path = (name) => encodeURIComponent(name);

export function Model({ picture, rest }) {
  const name = rest.join("/"); // a slash may stand in the address as it is
  const model = models(picture).find((one) => one.name === name || one.workers[0].aliases?.includes(name));
  return model ? html`<${Known} key=${model.name} model=${model} picture=${picture} />`
    : html`<h2 tabindex="-1">${name || "Model"}</h2>
      <${Empty}>${name ? `There is no model ${name}.` : "No model is named."} <a href="#/">To the overview</a><//>`;
}

function Known({ model, picture }) {
  const { name, workers } = model;
  const shown = nearest(workers);
  const now = useNow(DETAILS_MS) / 1000;
  const [answer, wrong] = useAnswer(() => call("GET", `/v1/models/${path(name)}`), DETAILS_MS, [workers.map((one) => one.state).join()]);
  const details = answer?.modelctl;
  return html`<div class="model-head">
      <div class="row"><h2 tabindex="-1">${name}</h2><${State} worker=${shown} /></div>
      ${shown.description && html`<p>${shown.description}</p>`}
      <${Reason} worker=${shown} now=${now} />
      ${picture.admin && html`<${ModelOrders} model=${model} more />`}
    </div>
    ${reading("The details", details, wrong)}
    ${details?.figures && html`<${Figures} figures=${details.figures} workers=${workers} />`}
    ${details?.workers && workers.length > 1 && html`<${Workers} all=${details.workers} />`}
    ${details && html`<${About} details=${details} name=${name} />`}
    ${details?.settings && html`<${Settings} settings=${details.settings} name=${name} />`}
    ${picture.events && html`<${Events} name=${name} picture=${picture} />`}
    ${picture.admin && html`<${Section} title="Log">
      <${Log} label="Worker" names=${workers.map((worker) => worker.name)} picture=${picture} /><//>`}`;
}

function Figures({ figures, workers }) {
  const named = Object.entries(figures.errors_by_name).map(([name, n]) => `${name} ${count(n)}`).join(", ");
  const shown = [
    ["Tokens/s now", speed(sum(workers, (worker) => worker.tokens_per_s)), `${sum(workers, (worker) => worker.active)} running`],
    ["Tokens/s of an answer", speed(figures.tokens_per_s), "mean"],
    ["Time to first token", seconds(figures.time_to_first_token_s), figures.queue_s === null ? "mean" : `mean, ${seconds(figures.queue_s)} of it in the queue`],
    ["Prompt from cache", figures.cached_share === null ? "–" : `${Math.round(100 * figures.cached_share)} %`,
      `of ${count(figures.prompt_tokens)} tokens`],
    ["Requests", count(figures.finished), `${count(figures.tokens)} tokens in answers`],
    ["Errors", count(figures.errors), joined([named, figures.refused && `refused ${count(figures.refused)}`]) || "none"],
  ];
  return html`<${Section} title="Figures">
    <dl class="model-figures">${shown.map(([label, value, note]) => html`<div class="card" key=${label}>
      <dt class="small faint">${label}</dt><dd class="figure">${value}</dd><dd class="small faint">${note}</dd></div>`)}</dl>
    <p class="small faint">Since the supervisor's start.</p><//>`;
}

function Workers({ all }) {
  return html`<${Section} title="Workers"><div class="scroll" tabindex="0" role="group" aria-labelledby="workers-title"><table>
    <thead><tr>${["Worker", "State", "On"].map((title) => html`<th>${title}</th>`)}
      ${["Running", "Tokens/s", "GPU memory", "Restarts", "Process"].map((title) => html`<th class="number">${title}</th>`)}</tr></thead>
    <tbody>${all.map((worker) => html`<tr key=${worker.name}><td>${worker.name}</td><td><${State} worker=${worker} /></td><td>${on(worker)}</td>
      ${[worker.active, speed(worker.tokens_per_s), bytes(worker.vram_bytes), worker.restarts, worker.pid ?? "–"].map((figure) => html`
        <td class="number">${figure}</td>`)}</tr>`)}</tbody></table></div><//>`;
}

// The names, and what was found in the model's files when it was loaded.
function About({ details, name }) {
  const all = details.workers || [];
  const one = all.find((worker) => worker.chat !== null) || all[0];
  const codes = (names) => names.map((each, i) => html`${i > 0 && " "}<code>${each}</code>`);
  const yes = (value) => value === null || value === undefined ? null : value ? "yes" : "no";
  const facts = [
    ["Aliases", details.aliases.length > 0 && codes(details.aliases)],
    ["Variants", details.variants.length > 0 && codes(details.variants.map((variant) => `${name}:${variant}`))],
    ["Default model", details.default && html`requests without a model go to <code>${details.default}</code>`],
    ...one ? [
      ["Folder", one.folder],
      ["Engine", `${one.engine}${one.device ? ` on ${one.device}` : ""}`],
      ["Attention", one.attention],
      ["Decoding", one.decoding],
      ["Context", one.context && `${count(one.context)} tokens`],
      ["Requests at once", one.max_batch_size && count(one.max_batch_size)],
      ["Chat template", one.chat === null ? "known once the model is loaded" : one.template || yes(one.chat)],
      ["End tokens", one.end_tokens && codes(one.end_tokens.split(" "))],
      ["Tool calls", one.chat && (one.tool_format ? `${one.tool_format}${one.parallel_tool_calls === false ? ", one in an answer" : ""}` : "no")],
      ["Reasoning", one.chat && (one.reasoning ? codes([one.reasoning.start.trim(), one.reasoning.end.trim()]) : "no")],
      ["Sleep", one.chat !== null && yes(one.can_sleep)],
      ["Load time", one.load_seconds !== null && seconds(one.load_seconds)],
      ["Last wake", one.wake_s !== null && seconds(one.wake_s)],
      ["Host memory", one.host_bytes > 0 && bytes(one.host_bytes)],
      ["GPU memory", (one.vram_bytes || one.vram_estimate_bytes) && `${bytes(one.vram_bytes)} held, ${bytes(one.vram_estimate_bytes)} estimated`],
      ["Restarts", all.length === 1 && one.restarts > 0 && count(one.restarts)],
      ["Process", all.length === 1 && one.pid],
    ] : [],
  ];
  return html`<${Section} title="About"><${Facts} facts=${facts} kind="card" /><//>`;
}

// The place of a key, "models.yaml:7". A narrow column breaks it before the colon.
function breakable(source) {
  const at = source.lastIndexOf(":");
  return at < 0 ? source : html`${source.slice(0, at)}<wbr />${source.slice(at)}`;
}

function Settings({ settings, name }) {
  const [all, setAll] = useState(false);
  const given = settings.filter((setting) => setting.source !== "default");
  const key = (setting) => setting.key.slice(`models.${name}.`.length);
  return html`<${Section} title="Configuration" id="settings-title">
    <div class="row model-row">
      <label><input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} /> Show defaults</label>
      <${Copy} text=${asYaml(name, given.map((setting) => [key(setting), setting.value]))} label="Copy the configuration as YAML" />
    </div>
    <div class="scroll" tabindex="0" role="group" aria-labelledby="settings-title"><table class="model-settings">
      <thead><tr><th>Key</th><th>Value</th><th>From</th></tr></thead>
      <tbody>${(all ? settings : given).map((setting) => html`<tr key=${setting.key}><td>${key(setting)}</td>
        <td><code>${setting.value}</code></td><td class="faint">${breakable(setting.source)}</td></tr>`)}</tbody></table></div><//>`;
}

// The keys of a model as they stand in models.yaml. Some parts of a map may come from elsewhere: their keys have a dot.
function asYaml(name, keys) {
  let open = "";
  const lines = keys.flatMap(([key, value]) => {
    const [head, part] = [key.split(".")[0], key.split(".").slice(1).join(".")];
    const begin = part && head !== open ? [`    ${head}:`] : [];
    open = part ? head : "";
    return [...begin, part ? `      ${part}: ${value}` : `    ${head}: ${value}`];
  });
  return ["models:", `  ${name}:`, ...lines, ""].join("\n");
}

function Events({ name, picture }) {
  const newest = picture.events.findLast((event) => event.model === name)?.number;
  const [answer] = useAnswer(() => call("GET", `/v1/events?limit=${EVENTS}&model=${path(name)}`), 0, [newest, picture.session]);
  return html`<${Section} title="Events">${answer && html`<${EventList} events=${answer.events.toReversed()} />`}<//>`;
}
