// Where a long text is cut, so that no megabyte is drawn at once. Pure: no DOM.

/** Characters of a text that are drawn at first, and the most that one click adds. */
export const FOLDED = 2_500;
export const STEP = 50_000;
const SLACK = 600;

/** The end of the part of `text` to draw: about `length` characters, at the end of a line if one is near, no pair torn. */
export function cutAt(text, length) {
  if (text.length <= length + SLACK) return text.length;
  const line = text.lastIndexOf("\n", length);
  if (line > length - SLACK) return line + 1;
  const code = text.charCodeAt(length - 1);
  return code >= 0xd800 && code < 0xdc00 ? length - 1 : length;
}

/** The index after the first `count` characters as Python counts them: a pair of surrogates is one. */
export function afterCharacters(text, count) {
  let at = 0;
  for (let seen = 0; seen < count && at < text.length; seen += 1) at += text.codePointAt(at) > 0xffff ? 2 : 1;
  return at;
}
