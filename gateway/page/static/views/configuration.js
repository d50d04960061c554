import { Empty, html } from "../ui.js";

export function Configuration({ picture, rest }) {
  return html`<h2 tabindex="-1">Configuration</h2><${Empty}>Nothing yet.<//>`;
}
