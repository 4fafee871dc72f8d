// What each sample of an export contains.
import { html } from "../../lib/html.js";

export function SamplesView() {
  return html`<p>samples</p>`;
}
