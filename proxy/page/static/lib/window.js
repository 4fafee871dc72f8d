// Which rows of a long list are drawn. Pure: no DOM.

/**
 * The rows [from, to) of `count` that are seen, and `spare` more on either side.
 *
 * `top`: pixels scrolled; `height`: of the window; `row`: of a row.
 */
export function visible({ top, height, row, count, spare = 10 }) {
  const first = Math.floor(Math.max(0, top) / row);
  const from = Math.min(count, Math.max(0, first - spare));
  const to = Math.min(count, first + Math.ceil(height / row) + 1 + spare);
  return { from, to: Math.max(from, to) };
}

/** How far to scroll so that row `index` is seen whole; `top` if it is. `header`: pixels of a fixed header. */
export function scrolledTo(index, { top, height, row, header = 0 }) {
  const place = index * row;
  if (place < top) return place;
  return Math.max(top, place + row + header - height);
}

/** The row that a key leads to from row `at`, or null for another key. `page`: rows of a page. */
export function nextRow(key, at, count, page) {
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -count, End: count };
  if (!(key in steps) || count === 0) return null;
  return Math.min(count - 1, Math.max(0, at + steps[key]));
}
