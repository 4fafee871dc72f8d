// One row of the grid of tokens, and the row that heads the tokens which a turn brought.
import { logprob, number, percent, plural } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { printable } from "../../../lib/printable.js";
import { ImageCell } from "./image_cell.js";
import { isUntrained, stateAt } from "./token_model.js";

/**
 * A row of cells: `row` {from, to}; `top` in pixels; `found`: by token, whether a search found it; `active`: the token
 * of the focus. Its cells are no components, but those of images: a row is drawn at every step of the scroll bar.
 */
export function TokenRow({ index, row, top, model, classOf, found, active, sessionId }) {
  const cells = [];
  for (let at = row.from; at < row.to; at += 1) {
    if (model.hidden[at]) continue;
    if (model.tags.has(at)) cells.push(tag(model.tags.get(at)));
    const image = model.folds.get(at);
    if (image) {
      const within = found.subarray(at, at + image.length).includes(1);
      cells.push(html`<${ImageCell} key=${at} sessionId=${sessionId} image=${image} shown=${model.cells[at]} at=${at} found=${within} tab=${at === active ? 0 : -1} />`);
    } else cells.push(cell(model, at, `k${classOf[at]}${found[at] ? " found" : ""}`, at === active ? 0 : -1));
  }
  return html`<div class="tokens-row" role="row" aria-rowindex=${index + 1} style=${{ top: `${top}px` }}>
    <span class="tokens-number" role="rowheader">${number(row.from)}</span>${cells}
  </div>`;
}

function tag(words) {
  const kind = words[0] === "✓" ? "tokens-tag trained" : "tokens-tag";
  return html`<span class=${kind} role="presentation">${words}</span>`;
}

function cell(model, at, kind, tab) {
  const { shown, width } = model.cells[at];
  return html`<span class=${`token ${kind}${marks(model, at)}`} role="gridcell" data-token=${at} tabindex=${tab}
    aria-label=${label(model, at)} style=${WIDTHS[width]}>${shown}</span>`;
}

const WIDTHS = Array.from({ length: 80 }, (_, columns) => `width: ${columns}ch`);

/** The classes of a cell beside that of its colour. */
function marks(model, at) {
  const kind = model.kindOf[at];
  const state = !model.sampled[at] ? " context" : isUntrained(model, at) ? " sampled untrained" : " sampled";
  if (!kind) return state;
  return `${state}${kind & 1 ? " special" : ""}${kind & 2 ? " continues" : ""}${kind & 4 ? " broken" : ""}`;
}

/** What a screen reader says of a cell. */
function label(model, at) {
  const text = model.texts[at];
  const said = text ? spoken(text) : `token ${model.ids[at]}`;
  if (!model.sampled[at]) return `${said}, context`;
  return `${said}, logprob ${logprob(model.logprobs[at])}, ${stateAt(model, at)}`;
}

/** White space is named: nobody hears a blank. */
function spoken(text) {
  if (text.trim() !== "") return printable(text, { line: true });
  return text.includes("\n") ? "new line" : text.length > 1 ? `${text.length} spaces` : "space";
}

/** The head of the tokens that a turn brought: which turn, what they are, and what becomes of them. */
export function PartHead({ index, top, model, part: at }) {
  const part = model.parts[at];
  const sampled = part.kind === "output";
  const count = plural(part.end - part.start, "token");
  const name = `tokens-head ${part.kind}`;
  return html`<div class=${name} role="row" aria-rowindex=${index + 1} style=${{ top: `${top}px` }}>
    <span role="rowheader"><strong>${turnName(part)}</strong> ${sampled ? "answer" : "prompt"}</span>
    <span role="gridcell" class="tokens-head-facts">${sampled ? `${count} · ${facts(model, part)}` : count}</span>
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
  const words = [...states].map(([state, count]) => {
    const name = state === "trained" ? "✓ trained" : `✕ not trained: ${state}`;
    return states.size === 1 ? name : `${name} ${number(count)}`;
  });
  const likely = told ? `mean logprob ${logprob(sum / told)} (${percent(Math.exp(sum / told))})` : "no logprobs";
  return `${words.join(", ")} · ${likely} · ${[...versions].map((version) => `v${version}`).join(", ")}`;
}
