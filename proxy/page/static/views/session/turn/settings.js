// What a turn was asked with beside its messages: notes in words, tools, template options, sampling, and its ids.
import { CopyButton } from "../../../lib/copy.js";
import { reward, when } from "../../../lib/format.js";
import { html, useState } from "../../../lib/html.js";
import { inWords } from "../../../lib/words.js";
import { LongText, Line, Short, Text } from "./texts.js";

/** `turn`: with its messages. `reasons`: of the API. */
export function Settings({ turn, reasons }) {
  const notes = Object.entries(turn.notes).filter(([name]) => name !== "replay"); // recorded.js shows it
  const rewards = Object.entries(turn.rewards);
  const options = Object.entries(turn.template_options);
  return html`<section class="turn-settings" aria-label="Settings of the turn">
    ${notes.length > 0 && html`<${Folded} title="Notes" count=${notes.length} open>
      <${Notes} notes=${notes} reasons=${reasons} />
    <//>`}
    ${rewards.length > 0 && html`<${Folded} title="Named rewards" count=${rewards.length} open=${rewards.length <= 4} hint=${rewards.map(([name, value]) => `${name} ${value}`).join(", ")}>
      <${Rewards} rewards=${rewards} />
    <//>`}
    ${turn.tools.length > 0 && html`<${Folded} title="Tools" count=${turn.tools.length} hint=${turn.tools.slice(0, 12).map((tool) => tool.function.name).join(", ")}>
      <${Tools} tools=${turn.tools} />
    <//>`}
    ${options.length > 0 && html`<${Folded} title="Template options" count=${options.length} hint=${JSON.stringify(turn.template_options)}>
      <${Values} entries=${options} />
    <//>`}
    <${Folded} title="Sampling" hint=${Object.entries(turn.sampling).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ")}>
      <${Values} entries=${Object.entries(turn.sampling)} />
    <//>
    <${Folded} title="Ids and times" hint=${turn.interaction_id}><${Ids} turn=${turn} /><//>
  </section>`;
}

/** A part that is drawn when somebody opens it. */
function Folded({ title, count, hint, open = false, children }) {
  const [shown, setShown] = useState(open);
  return html`<details open=${open} onToggle=${(event) => setShown(event.currentTarget.open)}>
    <summary><span class="turn-summary">${title}${count === undefined ? "" : ` (${count})`}</span>${" "}
      ${!shown && hint && html`<span class="quiet small"><${Line} text=${hint} length=${110} /></span>`}</summary>
    ${shown && children}
  </details>`;
}

function Notes({ notes, reasons }) {
  return html`<dl class="turn-notes">${notes.map(([name, value]) => html`<div key=${name}>
    <dt><span class="badge warn">${inWords(name)}</span></dt>
    <dd><span class="mono"><${Text} text=${written(value)} /></span>
      <span class="quiet"> ${reasons.notes?.[name]}</span>
      ${name === "echo" && html`<ul>${value.map((word) => html`<li key=${word}><strong>${inWords(word)}</strong>: ${reasons.echo?.[word]}</li>`)}</ul>`}
    </dd>
  </div>`)}</dl>`;
}

const Rewards = ({ rewards }) => html`<dl class="turn-values">${rewards.map(([name, value]) => html`<div key=${name}>
  <dt><${Line} text=${name} length=${40} /></dt>
  <dd class="tabular">${reward(value)}</dd>
</div>`)}</dl>`;

const written = (value) => (typeof value === "string" ? value : Array.isArray(value) ? value.map(written).join(", ") : JSON.stringify(value));

function Tools({ tools }) {
  return html`<ul class="turn-tools">${tools.map(({ function: tool }, index) => html`<li key=${index}>
    <details>
      <summary><code><${Line} text=${tool.name} length=${60} /></code> <span class="quiet small"><${Line} text=${tool.description} length=${140} /></span></summary>
      ${tool.description && html`<${LongText} text=${tool.description} />`}
      <${LongText} text=${JSON.stringify(tool.parameters, null, 2)} class="mono" />
      ${tool.strict !== undefined && html`<p class="small quiet">strict: ${String(tool.strict)}</p>`}
    </details>
  </li>`)}</ul>`;
}

function Values({ entries }) {
  return html`<dl class="turn-values">${entries.map(([name, value]) => html`<div key=${name}>
    <dt class="mono"><${Line} text=${name} length=${40} /></dt>
    <dd><${LongText} text=${JSON.stringify(value, null, 2)} /></dd>
  </div>`)}</dl>`;
}

function Ids({ turn }) {
  const rows = [
    ["turn", turn.interaction_id], ["turn before", turn.parent_id], ["session", turn.session_id], ["state hash", turn.state_hash],
  ].filter(([, id]) => id !== null);
  return html`<dl class="turn-values">${rows.map(([name, id]) => html`<div key=${name}>
    <dt>${name}</dt>
    <dd><${Short} text=${id} length=${60} /> <${CopyButton} text=${id} label=${`the id: ${name}`} /></dd>
  </div>`)}
  <div><dt>begun</dt><dd class="tabular">${when(turn.times.created_at)}, ended ${when(turn.times.completed_at)}</dd></div>
  <div><dt>place</dt><dd>${turn.seq} in the order of completion${turn.parent_id === null ? "" : turn.aligned ? ", its prompt begins with the tokens of the turn before" : ", its prompt was rendered anew: it does not begin with the tokens of the turn before"}</dd></div></dl>`;
}
