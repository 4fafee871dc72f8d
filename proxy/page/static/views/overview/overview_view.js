// What the server does, in charts.
import { html } from "../../lib/html.js";

export function OverviewView({ name, query }) {
  return html`<h1>Overview</h1>`;
}
