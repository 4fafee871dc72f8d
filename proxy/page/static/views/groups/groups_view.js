// The groups, and one group.
import { html } from "../../lib/html.js";

export function GroupsView({ name, query }) {
  return html`<h1>Groups</h1>`;
}
