import { Empty, html } from "../ui.js";

export function Model({ picture, rest }) {
  return html`<h2 tabindex="-1">Model</h2><${Empty}>Nothing yet.<//>`;
}
