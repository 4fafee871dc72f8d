// One row of the tree: its place in the drawing, what happened, the answer's first words, tokens, reward and return.
import { Badge } from "../../../lib/badge.js";
import { compact, number, plural, reward } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { Icon } from "../../../lib/icon.js";
import { printable } from "../../../lib/printable.js";
import { Line } from "../../../lib/text.js";
import { ForkNote } from "../fork_note.js";
import { TreeGraph } from "./tree_graph.js";
import { excerpt, isCompared, isFork, isLost, isNumber, isUnaligned, meaningOf, wordOf } from "./tree_words.js";

export const NOTE = 116; // pixels: the height of what a row opens

/** `row`: of `layOut`, the `index`-th of `count`; `onToggle(id)` opens its note, `onFold(id)` folds its branches. */
export function TreeRow(props) {
  const { row, index, count, lanes, top, height, chosen, open, near, folded, meanings, sessionId } = props;
  const { onChoose, onToggle, onFold } = props;
  const { node } = row;
  return html`<div id=${`tree-row-${index}`} class=${`tree-row ${row.parent < 0 && index ? "is-root" : ""}`} role="treeitem"
    aria-level=${row.lane + 1} aria-posinset=${index + 1} aria-setsize=${count} aria-selected=${chosen}
    aria-expanded=${row.branches ? !row.hidden : undefined}
    style=${{ top: `${top}px`, height: `${height}px` }} onClick=${onChoose}>
    <${TreeGraph} row=${row} lanes=${lanes} height=${height} />
    <div class="tree-line">
      <span class="tree-turn tabular">
        ${isNumber(node.turn) ? html`${unseen("turn")}${node.turn}` : html`–${unseen("no turn")}`}
      </span>
      <${Word} node=${node} open=${open} meanings=${meanings} onToggle=${onToggle} />
      <${Chips} row=${row} near=${near} folded=${folded} onFold=${onFold} />
      <${Line} class="tree-words" text=${excerpt(node)} length=${160} />
      <${Tokens} node=${node} />
      <span class="number of-reward" title=${named(node)}>${worth("reward", node.reward) ?? marks(node)}</span>
      <span class="number of-return">${worth("return", node.return)}</span>
    </div>
    ${open && html`<${ForkNote} sessionId=${sessionId} node=${node} meaning=${meaningOf(node, meanings)} />`}
  </div>`;
}

/** The reason or status. Of a turn that simply goes on nothing is said: most do. */
function Word({ node, open, meanings, onToggle }) {
  if (node.status === "complete" && node.reason === "continued") return unseen("continued");
  const meaning = meaningOf(node, meanings), kind = kindOf(node);
  if (!isCompared(node) && !isLost(node)) {
    return html`<span class=${`badge ${kind}`} title=${meaning}>${wordOf(node)}</span>`;
  }
  const toggle = (event) => {
    event.stopPropagation();
    onToggle(node.interaction_id);
  };
  return html`<button type="button" class=${`badge ${kind}`} tabindex="-1" aria-expanded=${open} title=${meaning}
    onClick=${toggle}>
    ${wordOf(node)}<span aria-hidden="true">${open ? "▴" : "▾"}</span>
  </button>`;
}

const TITLES = {
  nearest: "The chosen turn forked; of all turns before it this one is the nearest.",
  unaligned: "The prompt does not begin with the parent's tokens.",
  orphan: "The turn that it continues is not among those of the session.",
};
const isLeftOut = (node) => node.trainable === false && node.status === "complete";
const isSideCall = (node) => Boolean(node.purpose) && node.purpose !== "main";

function Chips({ row, near, folded, onFold }) {
  const { node } = row;
  const fold = (event) => {
    event.stopPropagation();
    onFold(node.interaction_id);
  };
  return html`${row.branches > 0 &&
    html`<button type="button" class="badge tree-fold" tabindex="-1" aria-expanded=${!folded}
      title=${foldTitle(row, folded)} onClick=${fold}>
      <${Icon} name="fork" />${number(row.branches)}
      ${folded && html`<span class="tabular">+${number(row.hidden)}</span>`}
      ${unseen(row.branches === 1 ? "branch" : "branches")}
    </button>`}
    ${near && html`<${Badge} kind="past" text="nearest" title=${TITLES.nearest} />`}
    ${isUnaligned(node) && html`<${Badge} kind="warn" text="unaligned" title=${TITLES.unaligned} />`}
    ${row.orphan && html`<${Badge} kind="warn" text="no parent" title=${TITLES.orphan} />`}
    ${isLeftOut(node) && html`<${Badge} text="not trained" title="Marked as not to be trained." />`}
    ${isSideCall(node) && html`<span class="badge"><${Line} text=${node.purpose} length=${16} /></span>`}
    ${node.agent && html`<span class="badge"><${Line} text=${node.agent} length=${16} /></span>`}
    ${node.route && html`<span class="badge" title=${`route ${node.route} (${node.route_kind})`}><${Line} text=${node.route} length=${16} /></span>`}`;
}

function foldTitle(row, folded) {
  const branches = plural(row.branches, "branch", "branches");
  return folded ? `Show ${branches} of this turn (${plural(row.hidden, "turn")})` : `Hide ${branches} of this turn`;
}

function Tokens({ node }) {
  if (!isNumber(node.prompt_tokens)) return html`<span class="number tree-tokens"></span>`;
  const title = `${number(node.prompt_tokens)} tokens of prompt, ${number(node.output_tokens)} sampled`;
  return html`<span class="number tree-tokens" title=${title}>
    ${compact(node.prompt_tokens)} + ${compact(node.output_tokens)}${unseen("tokens")}
  </span>`;
}

function kindOf(node) {
  if (node.status === "failed" || node.reason === "drift") return "bad";
  if (node.status === "superseded") return "past";
  if (isLost(node)) return "warn";
  if (node.status === "running") return "info";
  return isFork(node) ? "past" : "";
}

/** A reward or return with its name, for those who hear it; null without one. */
const worth = (name, value) => (isNumber(value) ? html`${unseen(name)}${reward(value)}` : null);

/** A word for those who hear the row. */
const unseen = (word) => html`<span class="visually-hidden"> ${word} </span>`;

/** A sign that there are named rewards, where there is no other. */
const marks = (node) => (Object.keys(node.rewards ?? {}).length ? "…" : "");

/** Its named rewards in a line; undefined without any. */
function named(node) {
  const parts = Object.entries(node.rewards ?? {});
  return parts.map(([name, value]) => `${printable(name, { line: true })}: ${reward(value)}`).join(", ") || undefined;
}
