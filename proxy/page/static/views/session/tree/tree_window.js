// Which rows of a long list are drawn: rows have heights of their own, and only those near the view exist. Pure.

/** The tops of all rows, and the height of all as the last entry. `height(row, index)`: in pixels. */
export function topsOf(rows, height) {
  const tops = [0];
  rows.forEach((row, index) => tops.push(tops[index] + height(row, index)));
  return tops;
}

/** The index of the row at a vertical position; rows that are above or below the list count as its ends. */
export function rowAt(tops, y) {
  let low = 0, high = Math.max(0, tops.length - 2);
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (tops[middle] <= y) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The rows to draw as [start, end): those in view and `spare` pixels above and below. */
export function shownRows(tops, scrollTop, viewHeight, spare = 300) {
  if (tops.length < 2) return [0, 0];
  return [rowAt(tops, scrollTop - spare), rowAt(tops, scrollTop + viewHeight + spare) + 1];
}

/** Where to scroll so that a row is in view; the current place if it is. */
export function scrollFor(tops, index, scrollTop, viewHeight) {
  const [top, bottom] = [tops[index], tops[index + 1]];
  if (top < scrollTop) return top;
  return bottom > scrollTop + viewHeight ? Math.min(top, bottom - viewHeight) : scrollTop;
}
