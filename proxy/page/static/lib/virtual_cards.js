// A long list as cards of one height, for narrow windows: what matters most first, and all else below it.
import { html } from "./html.js";
import { VirtualList } from "./virtual_list.js";

const [LINE, FACT, AROUND, ACROSS] = [24, 20, 22, 3];

/**
 * The columns of a VirtualTable as cards. `card` of a column says where it is: "lead" (the first line, numbers first), "title" (the second),
 * "note" (in a line below), or "none"; all others are named facts, three in a line.
 */
export function VirtualCards({ columns, rows, label, chosen, onEnd, children, class: name = "" }) {
  const of = (place) => columns.filter(({ card }) => card === place);
  const [lead, title, notes, facts] = ["lead", "title", "note", undefined].map(of);
  const height = AROUND + LINE * (2 + Math.sign(notes.length)) + FACT * Math.ceil(facts.length / ACROSS);
  const draw = (index) => html`<article class="row-card card" aria-current=${chosen?.(rows[index]) ? "true" : undefined}>
    <div class="row-card-lead">${lead.map(cellOf(rows[index], index))}</div>
    <div class="row-card-title">${title.map(cellOf(rows[index], index))}</div>
    ${notes.length > 0 && html`<div class="row-card-notes">${notes.map(factOf(rows[index], index))}</div>`}
    <div class="row-card-facts">${facts.map(factOf(rows[index], index))}</div>
  </article>`;
  return html`<${VirtualList} class=${`row-cards ${name}`} count=${rows.length} row=${height} label=${label} onEnd=${onEnd} draw=${draw}>${children}<//>`;
}

const cellOf = (row, index) => ({ name, title, number, cell }) => html`<span key=${name} class=${number ? "row-card-first" : ""}>
  ${number && html`<span class="quiet small">${title}</span> `}${cell(row, index)}</span>`;

const factOf = (row, index) => ({ name, title, hint, cell }) => html`<span key=${name} class="cut" title=${hint}>
  <span class="quiet">${title}</span> <span class="tabular">${cell(row, index) || "–"}</span></span>`;
