// The cells of all tokens in rows. Only the rows that are seen, and that of the focus, are in the document.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../../lib/html.js";
import { useVirtual } from "../../../lib/virtual.js";
import { PartHead, TokenRow } from "./token_cells.js";
import { imageAt } from "./token_images.js";
import { layOut, rowOf, tokenAt } from "./token_rows.js";
import { Strip } from "./token_strip.js";

const ROW = 24;
/** Columns of the number before each row, and of the edge behind it. */
const MARGIN = 7.5;

/** `handle`: a ref that gets {show(token, focus)}. `active`: the token of the focus. `places`: what a search found. `onFold`: shows the tokens of an image, or folds them. */
export function TokenGrid({ handle, sessionId, model, classOf, colouring, active, places, onActive, onHover, onFold }) {
  const probe = useRef(null);
  const columns = useColumns(probe);
  const rows = useMemo(() => layOut(model, columns), [model, columns]);
  const { ref, from, to } = useVirtual({ count: rows.length, row: ROW, spare: 6 });
  const [focused, setFocused] = useState(0);
  const found = useMemo(() => flags(places, model.count), [places, model]);
  const at = rowOf(rows, active);
  useLayoutEffect(() => {
    handle.current = {
      show(token, focus) {
        centre(ref.current, rowOf(rows, token));
        if (focus) setFocused((times) => times + 1);
      },
    };
  }, [rows]);
  useLayoutEffect(() => centre(ref.current, rowOf(rows, active)), [rows]);
  useEffect(() => {
    if (focused) ref.current.querySelector(`[data-token="${active}"]`)?.focus({ preventScroll: true });
  }, [focused, active]);
  const move = (token) => {
    keepSeen(ref.current, rowOf(rows, token));
    onActive(token);
    setFocused((times) => times + 1);
  };
  const onKeyDown = (event) => {
    if (event.altKey || event.metaKey) return;
    if (event.key === "Enter" && imageAt(model, active)) return onFold(active);
    const page = Math.max(1, Math.floor(ref.current.clientHeight / ROW) - 1);
    const next = tokenAt(event.key, { ctrl: event.ctrlKey, token: active, model, rows, page });
    if (next === null) return;
    event.preventDefault();
    move(next);
  };
  const drawn = shownRows(rows, from, to, at);
  const kept = useKept([rows, classOf, colouring, found]);
  const draw = (index, mark) => {
    const { of } = rows[index];
    const shared = { key: index, index, top: index * ROW, model };
    return of === null
      ? html`<${TokenRow} ...${shared} row=${rows[index]} classOf=${classOf} found=${found} active=${mark} sessionId=${sessionId} />`
      : html`<${PartHead} ...${shared} part=${of} />`;
  };
  return html`<div class="tokens-body">
    <div class=${`tokens-grid ${colouring}`} ref=${ref} role="grid" aria-label="Tokens" aria-rowcount=${rows.length}
      tabindex="-1" onKeyDown=${onKeyDown} onClick=${(event) => whenToken(event, move)}
      onMouseOver=${(event) => onHover(tokenOf(event))} onMouseLeave=${() => onHover(null)}>
      <span class="tokens-probe" ref=${probe} aria-hidden="true">${"0".repeat(50)}</span>
      <div class="tokens-space" role="presentation" style=${{ height: `${rows.length * ROW}px` }}>
        ${drawn.map((index) => kept(index, index === at ? active : -1, draw))}
      </div>
    </div>
    <${Strip} rows=${rows} row=${ROW} columns=${columns} model=${model} classOf=${classOf} colouring=${colouring}
      found=${found} scroller=${ref} />
  </div>`;
}

/** The rows to draw: those that are seen, and the row of the focus wherever it is, so that the focus is never lost. */
function shownRows(rows, from, to, at) {
  const seen = Array.from({ length: Math.max(0, Math.min(to, rows.length) - from) }, (_, offset) => from + offset);
  if (at < from) return [at, ...seen];
  return at >= to && at < rows.length ? [...seen, at] : seen;
}

/** Rows that were drawn before are taken as they were: a step of the scroll bar then draws the new rows only. */
function useKept(needs) {
  const kept = useMemo(() => new Map(), needs);
  return (index, mark, draw) => {
    const old = kept.get(index);
    if (old?.mark === mark) return old.drawn;
    const drawn = draw(index, mark);
    kept.set(index, { mark, drawn });
    return drawn;
  };
}

function useColumns(probe) {
  const [columns, setColumns] = useState(80);
  useLayoutEffect(() => {
    const [ruler, grid] = [probe.current, probe.current.parentElement];
    const measure = () => {
      const one = ruler.getBoundingClientRect().width / 50;
      if (one > 0) setColumns(Math.max(20, Math.floor(grid.clientWidth / one) - MARGIN));
    };
    measure();
    const watcher = new ResizeObserver(measure);
    watcher.observe(grid);
    watcher.observe(ruler);
    return () => watcher.disconnect();
  }, []);
  return columns;
}

function flags(places, count) {
  const found = new Uint8Array(count);
  for (const [first, last] of places) found.fill(1, first, last + 1);
  return found;
}

function centre(element, row) {
  const top = row * ROW;
  const seen = top >= element.scrollTop && top + ROW <= element.scrollTop + element.clientHeight;
  if (!seen) element.scrollTop = top - element.clientHeight / 2;
}

function keepSeen(element, row) {
  const top = row * ROW;
  if (top - ROW < element.scrollTop) element.scrollTop = top - ROW;
  else if (top + ROW > element.scrollTop + element.clientHeight) element.scrollTop = top + ROW - element.clientHeight;
}

function tokenOf(event) {
  const cell = event.target.closest("[data-token]");
  return cell ? Number(cell.dataset.token) : null;
}

function whenToken(event, act) {
  const token = tokenOf(event);
  if (token !== null) act(token);
}
