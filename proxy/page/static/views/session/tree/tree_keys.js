// What a key does in the tree: which row it goes to, or which branches it folds. Pure.

const PAGE = 15;

/**
 * @param {string} key of a KeyboardEvent
 * @param {object[]} rows of `layOut`
 * @param {number} at the index of the current row, -1 for none
 * @returns {{to?: number, fold?: string, unfold?: string}|null} the row to go to, or the id of the node to fold or
 *   unfold; null if the key means nothing here
 */
export function keyAction(key, rows, at) {
  if (!rows.length) return null;
  const row = rows[at], last = rows.length - 1;
  const jump = { Home: 0, End: last, ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + PAGE, PageUp: at - PAGE }[key];
  if (jump !== undefined) return { to: Math.min(last, Math.max(0, jump)) };
  if (!row) return null;
  if (key === "ArrowLeft") return left(row);
  if (key === "ArrowRight") return right(rows, row, at);
  return null;
}

function left(row) {
  if (row.branches && !row.hidden) return { fold: row.node.interaction_id };
  return row.parent >= 0 ? { to: row.parent } : null;
}

function right(rows, row, at) {
  if (row.hidden) return { unfold: row.node.interaction_id };
  return rows[at + 1]?.parent === at ? { to: at + 1 } : null;
}

/**
 * The index of the next row for which `wanted(node)` holds, from `at` on and round; -1 if there is none.
 * @param {1|-1} step
 */
export function nextRow(rows, at, wanted, step = 1) {
  for (let index = 1; index <= rows.length; index += 1) {
    const place = (((at + step * index) % rows.length) + rows.length) % rows.length;
    if (wanted(rows[place].node)) return place;
  }
  return -1;
}
