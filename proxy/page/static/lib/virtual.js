// The scrolling of long lists: a hook that says which rows to draw, and moves the focus among them with the keys.
import { useCallback, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { nextRow, scrolledTo, visible } from "./window.js";

/**
 * `count` rows of `row` pixels within a scrolling element. Rows that are drawn have `data-row` (their index) and one
 * element with `data-focus` (a link or button), which the arrow keys, Page Up and Down, Home and End go to.
 *
 * Returns {ref, from, to, onKeyDown, scrollTo(index)}: `ref` and `onKeyDown` for the scrolling element. `onEnd` is
 * called when the last row is near.
 */
export function useVirtual({ count, row, header = 0, spare = 10, onEnd }) {
  const ref = useRef(null);
  const [view, setView] = useState({ top: 0, height: 800 });
  const wanted = useRef(null);
  useLayoutEffect(() => measured(ref.current, setView), []);
  const range = visible({ ...view, row, count, spare });
  const scrollTo = useCallback((index) => {
    const element = ref.current;
    const place = { top: element.scrollTop, height: element.clientHeight, row, header };
    element.scrollTop = scrolledTo(index, place);
  }, [row, header]);
  useLayoutEffect(() => {
    const target = wanted.current === null ? null : focusOf(ref.current, wanted.current);
    if (target) {
      wanted.current = null;
      target.focus({ preventScroll: true });
    }
  });
  useEffect(() => {
    if (onEnd && count > 0 && range.to >= count) onEnd();
  }, [range.to, count, onEnd]);
  const onKeyDown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    const at = Number(event.target.closest("[data-row]")?.dataset.row ?? -1);
    const next = nextRow(event.key, at, count, Math.max(1, Math.floor((view.height - header) / row) - 1));
    if (next === null) return;
    event.preventDefault();
    scrollTo(next);
    const target = focusOf(ref.current, next);
    if (target) target.focus({ preventScroll: true });
    else wanted.current = next;
  };
  return { ref, ...range, onKeyDown, scrollTo };
}

function focusOf(element, index) {
  return element.querySelector(`[data-row="${index}"] [data-focus]`) ?? element.querySelector(`[data-row="${index}"][data-focus]`);
}

function measured(element, setView) {
  const measure = () => setView({ top: element.scrollTop, height: element.clientHeight });
  measure();
  element.addEventListener("scroll", measure, { passive: true });
  const watcher = new ResizeObserver(measure);
  watcher.observe(element);
  return () => {
    element.removeEventListener("scroll", measure);
    watcher.disconnect();
  };
}
