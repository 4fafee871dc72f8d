// One row of the grid of tokens, and the row that heads the tokens which a turn brought.
import { logprob, number, percent, plural } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { printable } from "../../lib/printable.js";
import { isUntrained, stateAt } from "./token_model.js";

/** A row of cells: `row` {from, to}; `top` in pixels; `found`: by token, whether a search found it; `active`: the token of the focus. */
export function TokenRow({ index, row, top, model, classOf, found, active }) {
  const cells = [];
  for (let at = row.from; at < row.to; at += 1) cells.push(html`<${Cell} model=${model} at=${at} classOf=${classOf} found=${found} active=${active} />`);
  return html`<div class="tokens-row" role="row" aria-rowindex=${index + 1} style=${{ top: `${top}px` }}>
    <span class="tokens-number" role="rowheader">${number(row.from)}</span>${cells}
  </div>`;
}

function Cell({ model, at, classOf, found, active }) {
  const { shown, width } = model.cells[at];
  const kind = model.kindOf[at];
  const name = [
    "token", `k${classOf[at]}`, model.sampled[at] ? "sampled" : "context",
    isUntrained(model, at) && "untrained", kind & 1 && "special", kind & 2 && "continues", kind & 4 && "broken", found[at] && "found",
  ].filter(Boolean).join(" ");
  return html`${model.tags.has(at) && html`<span class=${`tokens-tag ${model.tags.get(at)[0] === "✓" ? "trained" : ""}`} role="presentation">${model.tags.get(at)}</span>`}<span class=${name}
    role="gridcell" data-token=${at} tabindex=${at === active ? 0 : -1} aria-label=${label(model, at)}
    style=${{ width: `${width}ch` }}>${shown}</span>`;
}

/** What a screen reader says of a cell. */
function label(model, at) {
  const text = model.texts[at];
  const said = text ? printable(text, { line: true }) : `token ${model.ids[at]}`;
  if (!model.sampled[at]) return `${said}, context`;
  return `${said}, logprob ${logprob(model.logprobs[at])}, ${stateAt(model, at)}`;
}

/** The head of the tokens that a turn brought: which turn, what they are, and what becomes of them. */
export function PartHead({ index, top, model, part: at }) {
  const part = model.parts[at];
  const [turn, count] = [turnName(part), part.end - part.start];
  return html`<div class=${`tokens-head ${part.kind}`} role="row" aria-rowindex=${index + 1} style=${{ top: `${top}px` }}>
    <span role="rowheader"><strong>${turn}</strong> ${part.kind === "output" ? "answer" : "prompt"}</span>
    <span role="gridcell" class="tokens-head-facts">${plural(count, "token")}${part.kind === "output" && html` · ${facts(model, part)}`}</span>
  </div>`;
}

/** "turn 3", or that a turn is not complete. */
export const turnName = (part) => (part.turn === null ? "turn that did not complete" : `turn ${part.turn}`);

function facts(model, part) {
  const states = new Map();
  const versions = new Set();
  let [sum, told] = [0, 0];
  for (let at = part.start; at < part.end; at += 1) {
    states.set(stateAt(model, at), (states.get(stateAt(model, at)) ?? 0) + 1);
    versions.add(model.versionOf[at]);
    if (model.logprobs[at] === null) continue;
    sum += model.logprobs[at];
    told += 1;
  }
  const whole = states.size === 1;
  const words = [...states].map(([state, count]) => `${state === "trained" ? "✓ trained" : `✕ not trained: ${state}`}${whole ? "" : ` ${number(count)}`}`);
  const likely = told ? `mean logprob ${logprob(sum / told)} (${percent(Math.exp(sum / told))})` : "no logprobs";
  return `${words.join(", ")} · ${likely} · ${[...versions].map((version) => `v${version}`).join(", ")}`;
}
