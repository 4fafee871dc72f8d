// The tokens of a turn, as the views of them need them: arrays by token instead of runs. Pure: no DOM.
import { cell } from "./token_text.js";

/** Ends of the bands of probability, from likely to unlikely: band 1 is 0.9 and above, band 5 below 0.01. */
export const BANDS = [0.9, 0.5, 0.1, 0.01];
export const COLOURS = ["logprob", "mask", "version"];
const VERSIONS = 6;

/**
 * The model of `tokens` (include=tokens of a turn). By token: `cells` ({shown, width, breaks}), `stateOf` and `partOf`
 * (indexes into `states` and `parts`), `versionOf` (-1: none), `kindOf` (bits: 1 special, 2 continues, 4 bytes that are
 * no text, 8 not in the vocabulary), `sampled` (1 or 0). `versions`: those that occur, ascending. `tags`: by token,
 * words before its cell. `images`: with {start, length}; `folds`, `hidden`: see token_images.js.
 */
export function tokenModel(tokens) {
  const count = tokens.ids.length;
  const kindOf = kinds(tokens, count);
  const model = {
    count, ids: tokens.ids, texts: tokens.texts, logprobs: tokens.logprobs, parts: tokens.parts, states: tokens.states,
    meanings: tokens.meanings, sections: tokens.sections, kindOf,
    images: tokens.images ?? [], folds: new Map(), hidden: new Uint8Array(count),
    cells: cellsOf(tokens, kindOf),
    stateOf: spread(tokens.states, count),
    partOf: spread(tokens.parts, count),
    versionOf: new Int32Array(count).fill(-1),
    sampled: new Uint8Array(count),
    versions: [...new Set(tokens.versions.map((run) => run.version))].sort((one, other) => one - other),
  };
  for (const run of tokens.versions) model.versionOf.fill(run.version, run.start, run.end);
  for (const part of tokens.parts) if (part.kind === "output") model.sampled.fill(1, part.start, part.end);
  model.tags = tagsOf(model, tokens.versions);
  return model;
}

function kinds({ ids, texts, special, continues, broken }, count) {
  const found = new Uint8Array(count);
  const specials = new Set(special);
  for (let at = 0; at < count; at += 1) found[at] = (specials.has(ids[at]) ? 1 : 0) | (texts[at] === "" ? 8 : 0);
  for (const at of continues) found[at] = (found[at] & ~8) | 2;
  for (const at of broken) found[at] |= 4;
  return found;
}

function cellsOf({ ids, texts }, kindOf) {
  const kept = new Map();
  return texts.map((text, at) => {
    const key = text ? text : ids[at] * 4 + (kindOf[at] & 2); // a number is no text
    if (!kept.has(key)) kept.set(key, cell(text, ids[at], (kindOf[at] & 2) > 0));
    return kept.get(key);
  });
}

function spread(runs, count) {
  const found = new Uint32Array(count);
  runs.forEach((run, index) => found.fill(index, run.start, run.end));
  return found;
}

/** Words before a token: where state or version change within an output, and where a section begins to differ. */
function tagsOf({ states, parts, sections, partOf, sampled, count }, versions) {
  const tags = new Map();
  const within = (at) => sampled[at] === 1 && parts[partOf[at]].start < at;
  const add = (at, words) => tags.set(at, tags.has(at) ? `${tags.get(at)} ${words}` : words);
  const changed = (runs, name) => runs.filter((run, at) => within(run.start) && runs[at - 1][name] !== run[name]);
  for (const { start, state } of changed(states, "state")) add(start, sign(state) + state);
  for (const { start, version } of changed(versions, "version")) add(start, `v${version}`);
  const differs = sections.at(-1)?.differs;
  if (differs && differs.index < count) tags.set(differs.index, `≠ ${tags.get(differs.index) ?? ""}`.trim());
  return tags;
}

const sign = (state) => (state === "trained" ? "✓" : "✕");

/** The state of a token: "context", "trained", or why it is not trained. */
export const stateAt = (model, at) => model.states[model.stateOf[at]].state;

/** Whether a token was sampled and is not trained. */
export const isUntrained = (model, at) => model.sampled[at] === 1 && stateAt(model, at) !== "trained";

/** The band of a logprob, 1 (likely) to 5 (unlikely); 0 without one. */
export function band(logprob) {
  if (logprob === null || logprob === undefined) return 0;
  const probability = Math.exp(logprob);
  const found = BANDS.findIndex((least) => probability >= least);
  return found < 0 ? BANDS.length + 1 : found + 1;
}

/**
 * The class of each token under a colouring. 0 is context. logprob: its band, 1 to 5; 6: sampled without one. mask: 1
 * trained, 2 not. version: 1 to 6, in turn.
 */
export function classes(model, colouring) {
  const found = new Uint8Array(model.count);
  const place = new Map(model.versions.map((version, index) => [version, 1 + (index % VERSIONS)]));
  for (let at = 0; at < model.count; at += 1) {
    if (!model.sampled[at]) continue;
    if (colouring === "logprob") found[at] = band(model.logprobs[at]) || 6;
    else if (colouring === "mask") found[at] = isUntrained(model, at) ? 2 : 1;
    else found[at] = place.get(model.versionOf[at]) ?? 0;
  }
  return found;
}

/** How many tokens each class has, by class. */
export function tally(classOf) {
  const counts = new Array(8).fill(0);
  for (const each of classOf) counts[each] += 1;
  return counts;
}

/** The states of the tokens of this path with their numbers, in order of appearance: [[state, count]]. */
export function stateCounts(model) {
  const counts = new Map();
  for (const run of model.states) counts.set(run.state, (counts.get(run.state) ?? 0) + run.end - run.start);
  return [...counts];
}

/** The sampled tokens by logprob, the lowest first. */
export function lowestFirst(model) {
  const found = [];
  model.logprobs.forEach((value, at) => value !== null && found.push(at));
  return found.sort((one, other) => model.logprobs[one] - model.logprobs[other] || one - other);
}

/** The first token of the next run that is not trained, behind `at`, then from the beginning; -1: there is none. */
export function nextUntrained(model, at) {
  const starts = model.states.map((run) => run.start).filter((start) => isUntrained(model, start));
  return starts.find((start) => start > at) ?? starts[0] ?? -1;
}
