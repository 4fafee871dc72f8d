// A call that runs: what is known of it before it ends.
import { Status } from "../../lib/badge.js";
import { Age } from "../../lib/clock.js";
import { number } from "../../lib/format.js";
import { html } from "../../lib/html.js";

/** `node`: an entry of `running`. */
export function RunningPanel({ node }) {
  return html`<div class="running-panel">
    <h2>A call that runs <${Status} status="running" /></h2>
    <p>It began <${Age} at=${node.begun_at} /> ago. Its messages and tokens can be read once it has ended; it then appears here by itself.</p>
    ${node.here
      ? html`<p>${number(node.prompt_tokens)} tokens of prompt, ${number(node.output_tokens)} tokens sampled so far.</p>`
      : html`<p>It runs in another worker or server, or a crash of the server cut it off: then it never ends, and a retry replaces it.</p>`}
    <p class="mono small quiet">${node.interaction_id}</p>
  </div>`;
}
