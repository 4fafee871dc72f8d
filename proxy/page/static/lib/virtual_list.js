// A list of any length whose rows have one height and are drawn by the caller: for what is no table.
import { html } from "./html.js";
import { useVirtual } from "./virtual.js";

/** `count` rows of `row` pixels; `draw(index)` returns the inside of one; `label`: the name of the list; `children` are below them. */
export function VirtualList({ count, row = 28, draw, label, onEnd, children, class: name = "" }) {
  const { ref, from, to, onKeyDown } = useVirtual({ count, row, onEnd });
  const shown = Array.from({ length: to - from }, (_, offset) => from + offset);
  return html`<div class=${`virtual ${name}`} ref=${ref} onKeyDown=${onKeyDown} tabindex="0" role="region" aria-label=${label}>
    <div class="virtual-space" role="list" style=${{ height: `${count * row}px` }}>
      ${shown.map((index) => html`<div key=${index} class="virtual-row" role="listitem" data-row=${index}
        aria-posinset=${index + 1} aria-setsize=${count} style=${{ top: `${index * row}px`, height: `${row}px` }}>${draw(index)}</div>`)}
    </div>
    ${children}
  </div>`;
}
