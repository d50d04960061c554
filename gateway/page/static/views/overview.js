import { address, Bar, bytes, Empty, html, Icon, inWords, joined, Section, span, speed, State, sum, useNow, useState } from "../ui.js";
import { models, speeds, SPEEDS, workers } from "../live.js";
import { DOWN, EventList, ModelOrders, nearest, on, Reason } from "../model_parts.js";
import { Log } from "../log.js";

const countdown = (s) => s < 60 || s >= 3600 ? span(s) : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;

export function Overview({ picture }) {
  const all = models(picture);
  const now = useNow() / 1000;
  return html`<h2 tabindex="-1">Overview</h2>
    <div class="summary"><p>${summary(picture, all)}</p>
      ${Object.entries(picture.supervisor?.troubles || {}).map(([name, words]) => html`
        <p class="trouble" key=${name}><${Icon} name="failed" /> <span><b>${name}</b>: ${words}</span></p>`)}</div>
    ${picture.gpus?.length > 0 && html`<${Section} title="GPUs">
      <div class="gpus">${picture.gpus.map((gpu) => html`<${Gpu} key=${gpu.uuid} gpu=${gpu} picture=${picture} />`)}</div><//>`}
    <${Section} title="Models">${all.length ? html`<div class="cards">${all.map((model) => html`
      <${ModelCard} key=${model.name} model=${model} picture=${picture} now=${now} />`)}</div>`
      : html`<${Empty}>models.yaml names no model.<//>`}<//>
    ${picture.events && html`<${Section} title="Events"><${EventList} events=${picture.events.toReversed()} linked /><//>`}
    ${picture.admin && html`<${Logs} picture=${picture} />`}`;
}

function summary(picture, all) {
  const shown = workers(picture);
  const having = (state) => all.filter((model) => model.workers.some((worker) => worker.state === state)).length;
  const [asleep, failed] = [having("asleep"), having("failed")];
  return joined([
    `${having("ready")} of ${all.length} models ready`, asleep && `${asleep} asleep`, failed && `${failed} failed`,
    ...picture.supervisor ? [
      `${sum(shown, (worker) => worker.active)} running`, `${sum(all, (model) => model.workers[0].queued)} queued`,
      `${speed(sum(shown, (worker) => worker.tokens_per_s))} tokens/s`,
    ] : [],
  ]);
}

function Gpu({ gpu, picture }) {
  const holding = workers(picture).map((worker) => [worker, worker.node ? null : worker.vram_by_gpu?.[gpu.index]])
    .filter(([, held]) => held);
  const others = gpu.used_bytes - sum(holding, ([, held]) => held);
  const limit = gpu.limit_bytes ?? null;
  const power = gpu.power_watts ?? null;
  const sensors = joined([
    gpu.utilization_percent !== null && `${gpu.utilization_percent} % busy`,
    gpu.temperature_celsius !== null && `${gpu.temperature_celsius} °C`,
    power !== null && `${power}${gpu.power_limit_watts === null ? "" : ` of ${Math.round(gpu.power_limit_watts)}`} W`,
  ]);
  return html`<div class="card gpu" data-gpu=${gpu.index}>
    <div class="row"><h4>GPU ${gpu.index}</h4><span class="small number">${sensors}</span></div>
    <${Bar} held=${gpu.used_bytes / gpu.total_bytes} limit=${limit === null ? null : limit / gpu.total_bytes} />
    <p class="small">${bytes(gpu.used_bytes)} of ${bytes(gpu.total_bytes)} used${limit === null ? "" : `, limit ${bytes(limit)}`}</p>
    ${holding.length > 0 && html`<p class="small faint">${joined([
      ...holding.map(([worker, held]) => `${worker.name} ${bytes(held)}`), others >= 2 ** 27 && `others ${bytes(others)}`])}</p>`}
  </div>`;
}

function ModelCard({ model, picture, now }) {
  const { name, workers: all } = model;
  const shown = nearest(all);
  return html`<article class=${`card model ${shown.state === "failed" ? "failed" : ""}`} data-name=${name}>
    <div class="row"><h4><a href=${address("models", name)}>${name}</a></h4><${State} worker=${shown} /></div>
    ${shown.description && html`<p class="small">${shown.description}</p>`}
    <${Reason} worker=${shown} now=${now} />
    <${Speed} all=${all} down=${DOWN.includes(shown.state)} />
    <${Memory} all=${all} gpus=${picture.gpus || []} />
    ${shown.tokens_per_s !== undefined && html`<p class="small faint number facts">${facts(shown, all, now)}</p>`}
    ${all.length > 1 && html`<ul class="small">${all.map((worker) => html`
      <li key=${worker.name} class="row"><span>${worker.name}</span><${State} worker=${worker} />
        <span class="faint number">${joined([worker.active !== undefined && `${worker.active} running`, on(worker)])}</span></li>`)}</ul>`}
    ${picture.admin && html`<${ModelOrders} model=${model} />`}
  </article>`;
}

// A model that is down has a speed only while its line shows one.
function Speed({ all, down }) {
  const lines = all.map(speeds);
  const length = Math.max(0, ...lines.map((line) => line.length));
  const total = Array.from({ length }, (_, i) => sum(lines, (line) => line[line.length - length + i]));
  if (!length || (down && total.every((rate) => rate === 0))) return null;
  const most = Math.max(1, ...total);
  const points = total.map((rate, i) => `${SPEEDS - length + i} ${(19 - 18 * rate / most).toFixed(1)}`);
  return html`<div class="speed">
    <p><span class="figure">${speed(sum(all, (worker) => worker.tokens_per_s))}</span> <span class="small faint">tokens/s</span></p>
    <svg viewBox=${`0 0 ${SPEEDS - 1} 20`} preserveAspectRatio="none" role="img"
      aria-label=${`Tokens per second in the last two minutes, at most ${speed(Math.max(...total))}`}>
      ${length > 1 && html`<path d=${`M${points.join("L")}`} />`}</svg>
  </div>`;
}

// What the workers hold and need, as shares of the GPUs on which they were placed.
function Memory({ all, gpus }) {
  const [held, estimated] = [sum(all, (worker) => worker.vram_bytes), sum(all, (worker) => worker.vram_estimate_bytes)];
  if (!held && !estimated) return null;
  const used = new Set(all.flatMap((worker) => worker.node ? [] : worker.placed || []));
  const placed = gpus.filter((gpu) => used.has(gpu.index));
  const total = sum(placed, (gpu) => gpu.total_bytes) || Math.max(held, estimated);
  const limit = placed.some((gpu) => gpu.limit_bytes !== null) ? sum(placed, (gpu) => gpu.limit_bytes ?? gpu.total_bytes) : null;
  return html`<div><${Bar} held=${held / total} estimated=${estimated / total} limit=${limit === null ? null : limit / total} />
    <p class="small faint">GPU memory: ${joined([`${bytes(held)} held`, estimated && `${bytes(estimated)} estimated`,
      limit !== null && `limit ${bytes(limit)}`, placed.length && `${bytes(total)} in all`])}</p></div>`;
}

function facts(shown, all, now) {
  const until = Math.min(...all.map((worker) => worker.until ?? Infinity));
  const host = sum(all, (worker) => worker.host_bytes);
  return joined([
    `${sum(all, (worker) => worker.active)} running`, `${shown.queued} queued`, all.length === 1 && on(shown),
    host && `${bytes(host)} of host memory`, until < Infinity && `unloads in ${countdown(Math.max(0, until - now))}`,
    shown.since && `${inWords(shown.state)} for ${span(Math.max(0, now - shown.since))}`,
  ]);
}

// Nothing is asked while the logs are closed.
function Logs({ picture }) {
  const [open, setOpen] = useState(false);
  return html`<${Section} title="Logs">
    <details onToggle=${(event) => setOpen(event.target.open)}><summary>Of the supervisor and of the gateway</summary>
      <div class="logs">${open && html`<${Log} names=${["supervisor", "gateway"]} label="Log of" picture=${picture} />`}</div></details><//>`;
}
