import { Empty, html } from "../ui.js";

export function Keys({ picture, rest }) {
  return html`<h2 tabindex="-1">Keys</h2><${Empty}>Nothing yet.<//>`;
}
