// How the text of a token is seen in its cell, and how wide that is. Pure: no DOM.
import { parts, printable } from "../../../lib/printable.js";

/** What a cell shows of a token: at most so many characters. */
const LONGEST = 32;
const WIDE = new RegExp(
  "\\p{Emoji_Presentation}|[\\u1100-\\u115f\\u2e80-\\ua4cf\\uac00-\\ud7a3\\uf900-\\ufaff\\ufe30-\\ufe6f" +
    "\\uff00-\\uff60\\uffe0-\\uffe6\\u{20000}-\\u{3fffd}]",
  "u",
);
const MARKS_ONLY = /^[\p{M}\u200d]+$/u;
const PLAIN = /^[\x20-\x7e]*$/;
const SEGMENTS = new Intl.Segmenter("en", { granularity: "grapheme" });

/**
 * A token as its cell shows it: {shown, width (in ch), breaks (whether the row ends behind it)}.
 *
 * White space is visible: "·" a space, "⇥" a tab, "⏎" a new line. `continues`: it only goes on with a character.
 */
export function cell(text, id, continues) {
  if (continues) return { shown: "⋯", width: 1, breaks: false };
  if (text === null || text === "") return { shown: `⟨${id}⟩`, width: String(id).length + 2, breaks: false };
  const shown = visible(text);
  return { shown, width: Math.max(1, width(shown)), breaks: text.includes("\n") };
}

function visible(text) {
  const seen = printable(text).replaceAll(" ", "·").replaceAll("\t", "⇥").replaceAll("\n", "⏎");
  const whole = MARKS_ONLY.test(seen) ? `◌${seen}` : seen;
  return whole.length <= LONGEST ? whole : `${[...whole.slice(0, LONGEST)].slice(0, LONGEST - 1).join("")}…`;
}

/** The columns that a text takes: 2 for wide characters, 0 for marks on others. */
export function width(text) {
  if (PLAIN.test(text)) return text.length;
  let columns = 0;
  for (const { segment } of SEGMENTS.segment(text)) columns += WIDE.test(segment) ? 2 : 1;
  return columns;
}

/** A text as a JSON string in which nothing is hidden: what a bug report would need. */
export function escaped(text) {
  return parts(JSON.stringify(text))
    .map((part) => (typeof part === "string" ? part : part.name.split(" ")[0].replace(/^U\+(.*)$/, "\\u{$1}")))
    .join("");
}
