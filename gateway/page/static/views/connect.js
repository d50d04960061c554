import { Empty, html } from "../ui.js";

export function Connect({ picture, rest }) {
  return html`<h2 tabindex="-1">Connect</h2><${Empty}>Nothing yet.<//>`;
}
