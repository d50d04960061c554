import { address, Empty, html, State } from "../ui.js";
import { workers } from "../live.js";

export function Overview({ picture }) {
  const all = workers(picture);
  return html`<h2 tabindex="-1">Overview</h2>
    <section aria-labelledby="models-title">
      <h3 id="models-title">Models</h3>
      ${all.length ? html`<div class="cards">${all.map((worker) => html`
        <article class="card" key=${worker.name} data-name=${worker.name}>
          <div class="row"><h4><a href=${address("models", worker.model)}>${worker.name}</a></h4><${State} worker=${worker} /></div>
        </article>`)}</div>` : html`<${Empty}>models.yaml names no model.<//>`}
    </section>`;
}
