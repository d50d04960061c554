import { Empty, html } from "../ui.js";

export function Chat({ picture, rest }) {
  return html`<h2 tabindex="-1">Chat</h2><${Empty}>Nothing yet.<//>`;
}
