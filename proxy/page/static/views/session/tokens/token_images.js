// The tokens that stand for an image, drawn as one cell until somebody wants to see each of them. Pure: no DOM.
import { number } from "../../../lib/format.js";

/** Columns of the thumbnail in a cell, with the space behind it. */
const THUMBNAIL = 4.5;

/**
 * The model with all images folded but those whose first token is in `unfolded`. `folds`: images by the token whose cell
 * stands for all of theirs; `hidden`: 1 for the other tokens of these, which have no cell.
 */
export function withFolds(model, unfolded) {
  const folded = model.images.filter(({ start, length }) => length > 0 && start + length <= model.count && !unfolded.has(start));
  if (folded.length === 0) return model;
  const [cells, hidden, folds] = [model.cells.slice(), new Uint8Array(model.count), new Map()];
  for (const image of folded) {
    cells[image.start] = imageCell(image);
    hidden.fill(1, image.start + 1, image.start + image.length);
    folds.set(image.start, image);
  }
  return { ...model, cells, hidden, folds };
}

function imageCell({ width, height, length }) {
  const size = width && height ? `${width}×${height} ` : "";
  const shown = `${size}${number(length)} tokens`;
  return { shown, width: shown.length + THUMBNAIL, breaks: false };
}

/** The image that a token stands for; null for other tokens. */
export const imageAt = (model, at) => model.images.find(({ start, length }) => start <= at && at < start + length) ?? null;

/** The token whose cell stands for a token: itself, or the first one of a folded image. */
export function cellAt(model, at) {
  let cell = at;
  while (cell > 0 && model.hidden[cell]) cell -= 1;
  return cell;
}

/** The next token that has a cell, forwards (1) or backwards (-1); the same token at the end. */
export function nextCell(model, at, step) {
  let next = at + step;
  while (next > 0 && next < model.count && model.hidden[next]) next += step;
  return next < 0 || next >= model.count ? at : next;
}
