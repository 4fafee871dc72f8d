// Texts of agents as one can see them: controls, invisible and bidirectional characters become signs. Pure: no DOM.
// What a text shows must be what it holds: an override character could show "allowed" where "denied" is written.

const NAMES = {
  0x7f: "DEL", 0x85: "NEL", 0xa0: "NBSP", 0xad: "SHY", 0x61c: "ALM", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200e: "LRM",
  0x200f: "RLM", 0x2028: "LS", 0x2029: "PS", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO",
  0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM",
};
const HIDDEN = new RegExp(
  "[\\0-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200c\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb]" +
    "|[\\u{e0000}-\\u{e007f}]|\\p{Surrogate}",
  "gu",
);

/** Parts of a text: strings as they are, and {sign, name} for a character that would not be seen. Tabs and new lines stay. */
export function parts(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) found.push(text.slice(from, match.index));
    found.push(sign(match[0].codePointAt(0)));
    from = match.index + match[0].length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

/** The same as one string, for titles, labels and canvases. With `line`, tabs and new lines are signs, too. */
export function printable(text, { line = false } = {}) {
  const seen = parts(text).map((part) => (typeof part === "string" ? part : part.sign)).join("");
  return line ? seen.replaceAll("\t", "⇥").replaceAll("\n", "↵") : seen;
}

/** Whether a text would show something else than it holds. */
export const hasHidden = (text) => text.search(HIDDEN) >= 0;

/** A name for a downloaded file: letters, digits, dot, dash and underscore only, at most 80 of them. */
export const fileName = (text) => text.replace(/[^\w.-]+/g, "_").replace(/^[.]+/, "_").slice(0, 80) || "_";

function sign(code) {
  const name = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  if (code < 0x20) return { sign: String.fromCodePoint(0x2400 + code), name };
  return { sign: `⟨${NAMES[code] ?? name}⟩`, name: NAMES[code] ? `${name} ${NAMES[code]}` : name };
}
