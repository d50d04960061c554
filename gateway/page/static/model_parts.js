// What several views show of a model.
//
//   nearest(workers)                               the worker that stands for its model
//   on(worker)                                     where it runs
//   html`<${ModelOrders} model=${model} more />`   the buttons of an administrator; model as in live.js; more: with Reload
//   html`<${Reason} worker=${worker} now=${s} />`  why the model is in its state, and its last failure
//   html`<${EventList} events=${newest first} linked />`   linked: with a link to the model of each event

import {
  address, ago, announce, Button, clock, Empty, FormDialog, html, Icon, inWords, joined, order, sum, Time, useState,
} from "./ui.js";
import { call } from "./session.js";

export const DOWN = ["stopped", "failed", "unloaded"];
const LEAVING = ["draining", "stopping"];
const SLEEPING = ["falling_asleep", "asleep"];
const FEW_EVENTS = 10;

// The state of a model is that of the worker that is nearest to serving.
export const nearest = (all) => all.find((worker) => worker.state === "ready") || all.find((worker) => !DOWN.includes(worker.state)) || all[0];

// Where a worker runs.
export const on = (worker) => joined([
  worker.node, worker.gpu === "cpu" ? "CPU" : worker.placed?.length ? `GPU ${worker.placed.join(", ")}` : worker.gpu && `GPU ${worker.gpu}`,
]);

// A button stays while its order changes, and it is never disabled for the browser, so that the focus stays on it.
export function ModelOrders({ model, more }) {
  const [asking, setAsking] = useState(false);
  const { name, workers: all } = model;
  const { state, queued, can_sleep } = nearest(all);
  const active = sum(all, (worker) => worker.active);
  const give = (label, verb = label.toLowerCase()) =>
    order(`${label} ${name}`, () => call("POST", `/v1/models/${encodeURIComponent(name)}/${verb}`));
  const one = (label, possible, act = () => give(label), kind) => html`<${Button} kind=${kind} label=${`${label} ${name}`}
    aria-disabled=${!possible} onClick=${() => possible ? act() : announce(`not while it is ${inWords(state)}`)}>${label}<//>`;
  const sleeping = SLEEPING.includes(state);
  const stop = () => active + (queued || 0) > 0 ? setAsking(true) : give("Stop");
  return html`<div class="row orders">
    <span key="load">${DOWN.includes(state) ? one("Load", true) : one("Unload", !LEAVING.includes(state))}</span>
    ${(can_sleep || sleeping) && html`<span key="sleep">${sleeping ? one("Wake", true) : one("Sleep", state === "ready")}</span>`}
    ${more && html`<span key="reload">${one("Reload", state === "ready")}</span>`}
    <span key="stop">${one("Stop", !["stopped", "stopping", "unloaded"].includes(state), stop, "danger")}</span>
    ${asking && html`<${FormDialog} title=${`Stop ${name}?`} label="Stop" kind="danger" onClose=${() => setAsking(false)}
      act=${async () => { setAsking(false); give("Stop"); }}>
      <p>It has ${active} running and ${queued} queued requests. Queued requests end with an error, and running ones have a short time
        to finish.</p><//>`}
  </div>`;
}

export function Reason({ worker, now }) {
  const last = worker.last_exit?.time && worker.last_exit.reason !== "asked" ? worker.last_exit : null;
  const why = worker.reason || (worker.state === "asleep" ? worker.unloaded : "");
  const failing = ["failed", "backoff"].includes(worker.state);
  return html`
    ${why && html`<p class=${`small reason ${failing ? "error" : "faint"}`}>${why}</p>`}
    ${last && html`<p class="small faint reason">Last failure <${Time} at=${1000 * last.time}>${ago(1000 * last.time, 1000 * now)}<//>${last.message === why ? "" : `: ${last.message}`}</p>`}`;
}

export function EventList({ events, linked }) {
  const [more, setMore] = useState(false);
  return html`
    ${events.length === 0 && html`<${Empty}>Nothing has happened yet.<//>`}
    <ol class="events">${events.slice(0, more ? undefined : FEW_EVENTS).map((event) => html`<li key=${event.number} class=${event.level}>
      <${Time} at=${1000 * event.time}>${clock(event.time)}<//>
      ${event.level === "info" ? html`<i />` : html`<${Icon} name="failed" />`}
      ${linked ? html`<span>${event.model && html`<a href=${address("models", event.model)}>${event.worker || event.model}</a> `}${said(event)}</span>`
        : html`<span>${event.message}</span>`}
    </li>`)}</ol>
    ${events.length > FEW_EVENTS && html`<${Button} aria-expanded=${more} onClick=${() => setMore(!more)}>
      ${more ? `Show the latest ${FEW_EVENTS}` : `Show ${events.length - FEW_EVENTS} more`}<//>`}`;
}

// The message without the name of the worker, which the link before it has.
function said({ worker, model, message }) {
  const name = `${worker || model}: `;
  return message.startsWith(name) ? message.slice(name.length) : message;
}
