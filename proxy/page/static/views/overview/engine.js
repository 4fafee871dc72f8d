// The engine: its version and pause, and of a pool its servers with their states.
import { Badge } from "../../lib/badge.js";
import { number, percent } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { Line } from "../../lib/text.js";

const STATES = {
  alive: ["good", "●", "takes requests"],
  failing: ["warn", "▲", "failed lately; gets no new requests until it has answered one"],
  ejected: ["bad", "✕", "does not answer; gets no requests"],
  leaving: ["past", "◌", "is being removed: what runs there ends first"],
  missing: ["bad", "?", "was never reached"],
};

/** `of`: the statistics. */
export function Engine({ of }) {
  const { engine, servers } = of;
  return html`<section class="card overview-card overview-wide" aria-label="Engine">
    <header class="overview-head">
      <h2>Engine <span class="quiet small"><${Line} text=${engine.name} length=${24} /></span></h2>
      ${engine.paused === null
        ? html`<${Badge} kind="good" sign="●" text="runs" />`
        : html`<${Badge} kind="warn" sign="‖" text=${`paused (${engine.paused})`} title="requests wait until it goes on" />`}
    </header>
    ${servers === null ? html`<${Facts} of=${of} />` : html`<${Servers} servers=${servers} />`}
  </section>`;
}

/** Of an engine without servers behind it. */
function Facts({ of }) {
  const { engine } = of;
  return html`<dl class="overview-facts">
    <div><dt>model</dt><dd><${Line} text=${engine.model} length=${60} /></dd></div>
    <div><dt>weights</dt><dd class="tabular">version ${number(engine.version)}</dd></div>
    <div><dt>requests</dt><dd class="tabular">${number(of.in_flight)} in flight, ${number(of.waiting)} waiting</dd></div>
    <div>
      <dt>submitted again</dt>
      <dd class="tabular">${number(of.resubmissions.pause)} after a pause, ${number(of.resubmissions.lost)} after a lost server</dd>
    </div>
  </dl>`;
}

function Servers({ servers }) {
  if (servers.length === 0) return html`<p class="overview-none">There is no engine server: add one with POST /engine/servers.</p>`;
  return html`<div class="overview-scroll" tabindex="0" role="group" aria-label="Engine servers">
    <table class="overview-servers">
      <thead>
        <tr>
          <th scope="col">server</th>
          <th scope="col">state</th>
          <th scope="col" class="number">in flight</th>
          <th scope="col" class="number" title="prompt tokens that were in the server's prefix cache, of those of which it has said so">cached</th>
          <th scope="col" class="number">weights</th>
        </tr>
      </thead>
      <tbody>
        ${servers.map((server) => html`<${Server} key=${server.url} server=${server} />`)}
      </tbody>
    </table>
  </div>`;
}

function Server({ server }) {
  const [kind, sign, meaning] = STATES[server.state] ?? ["", "?", ""];
  return html`<tr>
    <th scope="row" class="mono"><${Line} text=${server.url} length=${48} /></th>
    <td><${Badge} kind=${kind} sign=${sign} text=${server.state} title=${meaning} />
      ${server.failure && html`<div class="quiet small"><${Line} text=${server.failure} length=${110} /></div>`}</td>
    <td class="number">${number(server.in_flight)}</td>
    <td class="number">${server.prompt_tokens > 0 ? percent(server.cached_tokens / server.prompt_tokens) : "–"}</td>
    <td class="number">${number(server.version)}</td>
  </tr>`;
}
