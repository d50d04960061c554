// The view Requests: what runs and waits, from the live picture, and the last requests that have ended. It asks for those itself.
// #/requests/ID looks for one id.
import {
  Button, Choice, clock, count, Empty, Facts, html, Icon, inWords, Mark, order, reading, Section, span, useAnswer, useMemo, useRef, useState,
} from "../ui.js";
import { call } from "../session.js";

const MOST = 1000;
const FIRST = 100; // rows that are drawn until somebody asks for all: 1,000 rows take the browser a tenth of a second with each change
const EVERY_MS = 2000;
const NONE = [];
const ENDS = { stop: "complete", length: "max tokens", tool_calls: "tool call", disconnected: "client left" };
const KINDS = { ok: ["Ok", "ready"], cancelled: ["Cancelled", "off"], error: ["Error", "failed"] };

const kindOf = (one) => one.error ? "error" : ["cancelled", "disconnected"].includes(one.finish_reason) ? "cancelled" : "ok";

function inTime(ms) {
  if (ms === null) return "–";
  if (ms < 60_000) return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
  return span(ms / 1000);
}

const keyOf = (one) => one.key ?? "no key";

function Unfinished({ requests, total }) {
  const title = useRef();
  const cancel = async (event, id) => {
    const buttons = [...event.currentTarget.closest("table").querySelectorAll("button")];
    const at = buttons.indexOf(event.currentTarget);
    if (await order(`Cancel ${id}`, () => call("POST", `/v1/requests/${encodeURIComponent(id)}/cancel`))) {
      (buttons[at + 1] || buttons[at - 1] || title.current).focus(); // its row is about to go
    }
  };
  const state = ({ state, queue_position: before }) =>
    before === null ? inWords(state) : before ? `queued, ${before} before it` : "queued, next";
  return html`<${Section} title="Running and waiting" id="unfinished-title" at=${title}>
    ${requests.length ? html`<div class="scroll"><table class="requests folds" aria-labelledby="unfinished-title">
      <thead><tr><th>ID</th><th>Model</th><th>State</th><th class="wide">Key</th><th class="number wide">Prompt tokens</th>
        <th class="number">Answer tokens</th><th class="number">Age</th><th class="wide">Worker</th><th><span class="hidden">Orders</span></th></tr></thead>
      <tbody>${requests.map((one) => html`<tr key=${one.id}>
        <td>${one.id}</td><td>${one.model}</td>
        <td><${Mark} kind=${one.state === "running" ? "ready" : "busy"} icon="busy">${state(one)}<//></td>
        <td class="wide">${keyOf(one)}</td>
        <td class="number wide">${one.prompt_tokens === null ? `~${count(one.prompt_tokens_estimate)}` : count(one.prompt_tokens)}</td>
        <td class="number" data-name="Answer tokens">${count(one.tokens)}</td>
        <td class="number" data-name="Age">${span(one.age_ms / 1000)}</td>
        <td class="wide">${one.worker ?? "–"}</td>
        <td><${Button} kind="danger" label=${`Cancel ${one.id}`} onClick=${(event) => cancel(event, one.id)}>Cancel<//></td>
      </tr>`)}</tbody></table></div>` : html`<${Empty}>No request runs or waits.<//>`}
    ${total > requests.length && html`<p class="all faint">${count(total - requests.length)} younger ones are not listed.</p>`}<//>`;
}

// The last requests that have ended, the newest first: all, and where the next ones begin. undefined before the first answer.
async function readEnded(known) {
  const read = (after) => call("GET", `/v1/requests/ended?limit=${MOST}${after === undefined ? "" : `&after=${after}`}`);
  let [answer, before] = [await read(known?.last), known?.all || []];
  if (known && (answer.dropped || answer.session !== known.session)) [answer, before] = [await read(), []];
  if (known && !answer.requests.length && answer.session === known.session) return known;
  return { ...answer, all: [...answer.requests.reverse(), ...before].slice(0, MOST) };
}

function Times({ one }) {
  const queue = one.queue_ms ?? one.total_ms;
  const first = one.first_token_ms ?? one.total_ms;
  const parts = [["Waiting", queue], ["Reading the prompt", first - queue], ["Answering", one.total_ms - first]];
  return html`<div class="times" aria-hidden="true">${parts.map(([, ms], i) => ms > 0 && html`
      <i class=${`part${i}`} style=${{ flexGrow: ms }} />`)}</div>
    <dl class="parts">${parts.map(([name, ms], i) => html`
      <div><dt><i class=${`part${i}`} aria-hidden="true" />${name}</dt><dd>${inTime(Math.max(0, ms))}</dd></div>`)}</dl>`;
}

function Details({ one }) {
  const cached = one.cached_tokens ? `, ${count(one.cached_tokens)} from the cache` : "";
  const facts = [
    ["Came", new Date(1000 * one.accepted).toLocaleString()],
    ["Key", keyOf(one)],
    ["Worker", one.worker ?? "none"],
    ["Priority", String(one.priority)],
    ["Prompt", one.prompt_tokens === null ? "not read" : `${count(one.prompt_tokens)} tokens${cached}`],
    ["Answer", `${count(one.tokens)} tokens${one.resumes ? `, resumed in another worker: ${one.resumes}` : ""}`],
    ["Other ids", one.trace_ids.join(", ")],
    ["Error", one.error && html`<span class="error">${[inWords(one.error), one.error_message].filter(Boolean).join(": ")}</span>`],
  ];
  return html`<div class="details"><${Times} one=${one} /><${Facts} facts=${facts} /></div>`;
}

function Row({ one, open, onToggle }) {
  const end = inWords(one.error || ENDS[one.finish_reason] || one.finish_reason || "ended");
  const id = `ended-${one.number}`;
  return html`
    <tr class="ended" onClick=${(event) => (event.target.closest("button") || getSelection().isCollapsed) && onToggle()}>
      <td><time>${clock(one.accepted)}</time></td>
      <td><${Button} kind="plain" aria-expanded=${open} aria-controls=${open ? id : undefined}><${Icon} name="more" />${one.id}<//></td>
      <td>${one.model}</td><td class="wide">${keyOf(one)}</td>
      <td><${Mark} kind=${KINDS[kindOf(one)][1]}>${end}<//></td>
      ${[one.prompt_tokens, one.cached_tokens, one.tokens].map((tokens) => html`<td class="number wide">${count(tokens)}</td>`)}
      ${[one.queue_ms, one.first_token_ms].map((ms) => html`<td class="number wide">${inTime(ms)}</td>`)}
      <td class="number" data-name="Total">${inTime(one.total_ms)}</td><td class="number wide">${count(one.tokens_per_s)}</td>
    </tr>
    ${open && html`<tr id=${id} class="about"><td colspan="12"><${Details} one=${one} /></td></tr>`}`;
}

function Ended({ sought }) {
  const [answer, wrong] = useAnswer(readEnded, EVERY_MS);
  const all = answer?.all || NONE;
  const [open, setOpen] = useState(0);
  const [most, setMost] = useState(FIRST);
  const [wanted, setWanted] = useState({ model: "", key: "", kind: "", id: sought });
  const want = (name, value) => setWanted((before) => ({ ...before, [name]: value }));
  const is = (name, value) => !wanted[name] || wanted[name] === value;
  const shown = useMemo(() => all.filter((one) => is("model", one.model) && is("key", keyOf(one)) && is("kind", kindOf(one))
    && [one.id, ...one.trace_ids].some((id) => id.includes(wanted.id.trim()))), [all, wanted]);
  const select = (name, label, options) => html`<${Choice} label=${label} value=${wanted[name]} onChange=${(value) => want(name, value)}
    options=${[["", "All"], ...options]} />`;
  const names = (f) => [...new Set(all.map(f))].sort().map((name) => [name, name]);
  // The rows are not drawn again with each picture.
  const table = useMemo(() => html`<div class="scroll"><table class="requests folds" aria-labelledby="ended-title">
    <thead><tr><th>Time</th><th>ID</th><th>Model</th><th class="wide">Key</th><th>End</th>
      ${["Prompt", "Cached", "Answer", "Waited", "First token"].map((title) => html`<th class="number wide">${title}</th>`)}
      <th class="number">Total</th><th class="number wide">Tokens/s</th></tr></thead>
    <tbody>${shown.slice(0, most).map((one) => html`<${Row} key=${one.number} one=${one} open=${open === one.number}
      onToggle=${() => setOpen(open === one.number ? 0 : one.number)} />`)}</tbody></table></div>`, [shown, open, most]);
  return html`<${Section} title="Ended">
    <form class="fields" onSubmit=${(event) => event.preventDefault()}>
      ${select("model", "Model", names((one) => one.model))}
      ${select("key", "Key", names(keyOf))}
      ${select("kind", "End", Object.entries(KINDS).map(([kind, [text]]) => [kind, text]))}
      <label>ID <input type="search" value=${wanted.id} spellcheck="false" onInput=${(event) => want("id", event.target.value)} /></label>
      <p class="small faint">${answer && `${count(shown.length)} of ${count(all.length)}`}</p>
    </form>
    ${reading("The ended requests", answer, wrong)}
    ${shown.length ? table : answer && html`<${Empty}>${all.length ? "No ended request matches."
      : "No request has ended since the supervisor was started."}<//>`}
    ${shown.length > most && html`<p class="all"><${Button} onClick=${() => setMost(MOST)}>Show all ${count(shown.length)}<//></p>`}<//>`;
}

export function Requests({ picture, rest }) {
  return html`<h2 tabindex="-1">Requests</h2>
    <${Unfinished} requests=${picture.requests || []} total=${picture.requests_total} />
    <${Ended} key=${rest[0]} sought=${rest[0] || ""} />`;
}
