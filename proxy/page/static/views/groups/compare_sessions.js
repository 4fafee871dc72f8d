// Chooses two sessions of a group to compare: at first the best and the worst one.
import { clip, reward } from "../../lib/format.js";
import { html, useState } from "../../lib/html.js";
import { printable } from "../../lib/printable.js";
import { link } from "../../lib/route.js";
import { sorted } from "./sorting.js";

const LONGEST = 40;

/** `rows`: the sessions of a group with their summaries. Nothing is drawn for fewer than two. */
export function CompareSessions({ rows }) {
  const [chosen, choose] = useState({});
  if (rows.length < 2) return null;
  const best = sorted(rows, "score");
  const rewarded = best.filter(({ summary }) => summary.score !== null);
  const two = { a: best[0].session_id, b: (rewarded.length > 1 ? rewarded : best).at(-1).session_id, ...chosen };
  const pick = (side, label) => html`<select aria-label=${label} value=${two[side]} onChange=${(event) => choose({ ...chosen, [side]: event.target.value })}>
    ${best.map(({ session_id: id, summary }) => html`<option key=${id} value=${id} selected=${id === two[side]}>${clip(printable(id, { line: true }), LONGEST)} (${reward(summary.score)})</option>`)}
  </select>`;
  return html`<span class="group-compare" role="group" aria-label="Compare two sessions">
    ${pick("a", "Session")} and ${pick("b", "Other session")}
    ${two.a === two.b ? html`<span class="quiet small">choose two</span>` : html`<a class="button" href=${link("compare", "", two)}>Compare</a>`}
  </span>`;
}
