// The side columns of a turn in words. Pure: no DOM.
import { number, plural } from "../../../lib/format.js";
import { inWords } from "../../../lib/words.js";

/** Columns by their name in words and what they have rows for; others have tokens and their own name. */
const KNOWN = {
  kept: ["kept sets", "token"],
  kept_logprobs: ["logprobs among kept ids", "token"],
  routed_experts: ["routed experts", "position"],
  top_logprobs: ["alternatives", "token"],
};
/** Columns that have a row wherever another one has. */
const BESIDE = ["top_token_ids"];

/**
 * [{name, words, whole}] of `replay`: {column: {rows, missing, stored}}. `whole`: nothing is missing.
 *
 * "kept sets: all 120 tokens", "routed experts: 12 of 540 positions missing".
 */
export function recordedWords(replay) {
  const columns = Object.entries(replay ?? {}).filter(([column]) => !BESIDE.includes(column));
  return columns.map(([column, { rows, missing, stored }]) => {
    const [name, unit] = KNOWN[column] ?? [inWords(column), "token"];
    const left = rows > missing && !stored;
    return { name, words: left ? "removed since" : wordsOf(rows, missing, unit), whole: missing === 0 && !left };
  });
}

function wordsOf(rows, missing, unit) {
  if (rows === 0) return `no ${unit}s`;
  if (missing === 0) return `all ${plural(rows, unit)}`;
  return missing === rows ? `all ${plural(rows, unit)} missing` : `${number(missing)} of ${plural(rows, unit)} missing`;
}
