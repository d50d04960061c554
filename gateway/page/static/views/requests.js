import { Empty, html } from "../ui.js";

export function Requests({ picture, rest }) {
  return html`<h2 tabindex="-1">Requests</h2><${Empty}>Nothing yet.<//>`;
}
