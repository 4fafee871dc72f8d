// A table of any length, of which only the rows that are seen are drawn. It stays a table for screen readers. In a narrow
// window its rows are cards.
import { html } from "./html.js";
import { Icon } from "./icon.js";
import { useNarrow } from "./narrow.js";
import { useVirtual } from "./virtual.js";
import { VirtualCards } from "./virtual_cards.js";

export const ROW = 28; // --row

/**
 * `columns`: [{name, title, hint, width (CSS), number: boolean, cell(row, index), sort, card}]; `rows`; `keyOf(row)`;
 * `label`: the name of the table; `total`: rows of the whole list, if more can be loaded; `chosen(row)`: marks a row;
 * `onEnd`: called when the last row is near. A cell that the keys should reach has an element with `data-focus`.
 * `sorting`: {name, descending, by(name)}: a heading whose column has `sort` sorts by this name, upwards if `descending` is
 * false. `children` are below the rows. `card`: the column's place in a card (lib/virtual_cards.js); without one in any column, there are no cards.
 */
export function VirtualTable(given) {
  const cards = useNarrow() && given.columns.some(({ card }) => card === "lead");
  return cards ? html`<${VirtualCards} ...${given} />` : html`<${Table} ...${given} />`;
}

function Table({ columns, rows, keyOf, label, total, chosen, onEnd, sorting, children, class: name = "" }) {
  const { ref, from, to, onKeyDown } = useVirtual({ count: rows.length, row: ROW, header: ROW, onEnd });
  const count = total === undefined ? rows.length : total;
  return html`<div class=${`virtual ${name}`} ref=${ref} onKeyDown=${onKeyDown} tabindex="0" role="region" aria-label=${label}>
    <table aria-rowcount=${count === null ? -1 : count + 1} aria-label=${label}>
      <colgroup>${columns.map(({ name: key, width }) => html`<col key=${key} style=${{ width }} />`)}</colgroup>
      <thead><tr aria-rowindex="1">${columns.map((column) => html`<${Heading} key=${column.name} column=${column} sorting=${sorting} />`)}</tr></thead>
      <tbody>
        <${Space} rows=${from} columns=${columns.length} />
        ${rows.slice(from, to).map((row, offset) => html`<tr
          key=${keyOf(row)} data-row=${from + offset} aria-rowindex=${from + offset + 2} aria-selected=${chosen?.(row) ? "true" : undefined}>
          ${columns.map(({ name: key, number, cell }) => html`<td key=${key} class=${number ? "number" : ""}>${cell(row, from + offset)}</td>`)}
        </tr>`)}
        <${Space} rows=${rows.length - to} columns=${columns.length} />
      </tbody>
    </table>
    ${children}
  </div>`;
}

function Heading({ column: { title, hint, number, sort }, sorting }) {
  const own = sorting && sort !== undefined;
  const way = own && sorting.name === sort ? (sorting.descending ? "descending" : "ascending") : undefined;
  return html`<th scope="col" class=${number ? "number" : ""} title=${hint} aria-sort=${way}>
    ${own
      ? html`<button type="button" class="sort" onClick=${() => sorting.by(sort)}>${title}${way && html`<${Icon} name=${way === "ascending" ? "up" : "down"} />`}</button>`
      : title}</th>`;
}

const Space = ({ rows, columns }) =>
  rows > 0 && html`<tr class="space" aria-hidden="true"><td colspan=${columns} style=${{ height: `${rows * ROW}px` }}></td></tr>`;
