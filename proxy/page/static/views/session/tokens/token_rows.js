// Where each token stands: rows of cells of a given width. Pure: no DOM, so sixty thousand tokens are laid out at once.

import { cellAt, nextCell } from "./token_images.js";

/** The space between two cells, and before the first, in ch. */
export const SPACE = 0.4;

/**
 * Rows of a model (see token_model.js) in `columns` ch: {from, to, of} with tokens [from, to) in each.
 *
 * `of`: in a row without tokens, which heads a part, the index of the part; else null. A row ends where the next cell
 * does not fit, behind a new line, and where a part ends. A cell wider than a row has a row of its own.
 */
export function layOut(model, columns) {
  const rows = [];
  model.parts.forEach((part, of) => {
    rows.push({ from: part.start, to: part.start, of });
    let from = part.start;
    let used = 0;
    for (let at = part.start; at < part.end; at += 1) {
      if (model.hidden[at]) continue;
      const needed = space(model, at);
      if (at > from && used + needed > columns) {
        rows.push({ from, to: at, of: null });
        [from, used] = [at, 0];
      }
      used += needed;
      if (model.cells[at].breaks) {
        rows.push({ from, to: at + 1, of: null });
        [from, used] = [at + 1, 0];
      }
    }
    if (from < part.end) rows.push({ from, to: part.end, of: null });
  });
  return rows;
}

/** The columns that a token takes with its tag and the space before it; 0 for one without a cell. */
export const space = (model, at) => model.hidden[at] ? 0 : model.cells[at].width + SPACE + tagSpace(model, at);

/** The columns of the tag before a token, with its space; 0 without one. */
export const tagSpace = (model, at) => (model.tags.has(at) ? model.tags.get(at).length + 2 * SPACE : 0);

/** The row of a token. */
export function rowOf(rows, token) {
  let [low, high] = [0, rows.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rows[middle].from <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The token that a key leads to from `token`, or null for another key. `page`: rows of a page. */
export function tokenAt(key, { ctrl, token, model, rows, page }) {
  const last = model.count - 1;
  if (last < 0) return null;
  const row = rowOf(rows, token);
  switch (key) {
    case "ArrowLeft": return nextCell(model, token, -1);
    case "ArrowRight": return nextCell(model, token, 1);
    case "ArrowUp": return below(model, rows, token, row, -1);
    case "ArrowDown": return below(model, rows, token, row, 1);
    case "PageUp": return below(model, rows, token, row, -page);
    case "PageDown": return below(model, rows, token, row, page);
    case "Home": return ctrl ? 0 : rows[row].from;
    case "End": return cellAt(model, ctrl ? last : rows[row].to - 1);
    default: return null;
  }
}

/** The token that stands nearest below (or above) another, `steps` rows away; rows without tokens are passed over. */
function below(model, rows, token, row, steps) {
  const step = Math.sign(steps);
  let target = Math.min(rows.length - 1, Math.max(0, row + steps));
  while (rows[target]?.of !== null && rows[target] !== undefined) target += step;
  if (!rows[target]) return token;
  const wanted = placeOf(model, rows[row], token) + model.cells[token].width / 2;
  let used = 0;
  for (let at = rows[target].from; at < rows[target].to; at += 1) {
    used += space(model, at);
    if (used >= wanted) return at;
  }
  return cellAt(model, rows[target].to - 1);
}

/** The column at which a cell begins in its row. */
export function placeOf(model, row, token) {
  let used = 0;
  for (let at = row.from; at < token; at += 1) used += space(model, at);
  return used + tagSpace(model, token) + SPACE;
}
