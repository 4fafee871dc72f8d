// What trainers told of the tokens of a path, as values by token and as bands of colour. Pure: no DOM.
import { number } from "../../../lib/format.js";

const BANDS = 5;

/** The streams of the turns whose outputs are among `parts`: {key, words, trainer, step, stream}. */
export function streams(turns, parts) {
  const here = new Set(parts.filter((part) => part.kind === "output").map((part) => part.interaction_id));
  const found = new Map();
  for (const turn of turns) {
    if (!here.has(turn.interaction_id)) continue;
    for (const stream of turn.streams) {
      const key = `${turn.trainer} ${turn.step} ${stream}`;
      found.set(key, { key, words: `${turn.trainer}, step ${turn.step}: ${stream}`, trainer: turn.trainer, step: turn.step, stream });
    }
  }
  return [...found.values()].sort((one, other) => other.step - one.step || one.key.localeCompare(other.key));
}

/** Values by interaction as values by token of a path. */
export function byToken(values, tokens) {
  const found = new Array(tokens.ids.length).fill(null);
  for (const part of tokens.parts) {
    if (part.kind !== "output" || !values[part.interaction_id]) continue;
    values[part.interaction_id].slice(0, part.end - part.start).forEach((value, at) => {
      found[part.start + at] = value;
    });
  }
  return found;
}

/** The upper ends of the bands, ascending, at most five: each band has about as many values as another. */
export function bandsOf(values) {
  const sorted = values.filter((value) => value !== null).sort((one, other) => one - other);
  if (!sorted.length) return [];
  const ends = Array.from({ length: BANDS }, (_, at) => sorted[Math.ceil((sorted.length * (at + 1)) / BANDS) - 1]);
  return [...new Set(ends)];
}

/** The class of each token: 1 for the lowest band, spread up to 5 for the highest; 6: sampled, and nothing was told. */
export function streamClasses(model, values, ends) {
  const found = new Uint8Array(model.count);
  for (let at = 0; at < model.count; at += 1) {
    if (!model.sampled[at]) continue;
    found[at] = values[at] === null ? BANDS + 1 : classOfBand(ends.findIndex((end) => values[at] <= end), ends.length);
  }
  return found;
}

/** The lowest band has class 1, the highest class 5, if there are several. */
const classOfBand = (band, bands) => (bands === 1 ? 1 : 1 + Math.round((band * (BANDS - 1)) / (bands - 1)));

/** [class, words] of each band, for the legend. */
export function bandWords(ends) {
  return ends.map((end, at) => [classOfBand(at, ends.length), ends.length === 1 ? value(end) : `≤ ${value(end)}`]);
}

/** A value of a stream with the digits that matter. */
export function value(told) {
  if (told === null || told === undefined) return "–";
  const text = Number.isInteger(told) ? number(told) : told.toPrecision(4);
  return text.replace("-", "−");
}
