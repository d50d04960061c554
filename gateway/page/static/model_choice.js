// The choice of a model, as the views Chat and Connect have it.
//
//   choices(picture)   [{ id, name, workers, plain }] of the listed models and variants (id: "a", "a:b"), those that
//                      answer soonest first, and those with a chat template before others. plain: the model has no such template.
//                      Models for vectors and scores are left out: they write no text
//   html`<${ModelChoice} all=${all} name=${id} onChange=${(id) => ...} />`

import { Choice, html } from "./ui.js";
import { models } from "./live.js";

const DOWN = ["stopped", "failed", "draining", "stopping"];
const templates = new Map(); // by model, whether it has a chat template. A model that starts again does not say so for a while

export function choices(picture) {
  const rank = ({ workers }) => Math.max(...workers.map((worker) =>
    (worker.state === "ready" ? 4 : DOWN.includes(worker.state) ? 0 : 2) + (worker.chat ? 1 : 0)));
  const found = models(picture);
  for (const { name, workers } of found) for (const { chat } of workers) if (typeof chat === "boolean") templates.set(name, chat);
  const writes = ({ workers }) => workers.every(({ makes }) => !makes);
  return found.filter(writes).sort((a, b) => rank(b) - rank(a)).flatMap((model) => {
    const plain = templates.get(model.name) === false;
    const { variants = [], unlisted = [] } = model.workers[0];
    const names = [model.name, ...variants.map((variant) => `${model.name}:${variant}`)];
    return names.filter((id) => !unlisted.includes(id)).map((id) => ({ ...model, id, plain }));
  });
}

export function ModelChoice({ all, name, onChange, disabled = false }) {
  const options = all.map(({ id }) => [id, id]);
  if (name && !all.some((one) => one.id === name)) options.unshift([name, `${name} (not in models.yaml)`]);
  return html`<div class="fields"><${Choice} label="Model" value=${name} options=${options} disabled=${disabled} onChange=${onChange} /></div>`;
}
