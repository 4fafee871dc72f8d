// The list of sessions.
import { html } from "../../lib/html.js";

export function SessionsView({ name, query }) {
  return html`<h1>Sessions</h1>`;
}
