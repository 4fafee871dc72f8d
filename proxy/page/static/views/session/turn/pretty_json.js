// JSON with line breaks, character by character as it was written: no number is rounded, no key is lost. Pure: no DOM.

const TOKEN = /"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s"{}[\],:]+/gs;
const DEEPEST = 40;

/** The JSON text with line breaks and indents, or null if it is no JSON. Only white space between its tokens changes. */
export function pretty(text) {
  if (!isJson(text)) return null;
  let out = "";
  let depth = 0;
  let before = "";
  for (const [token] of text.matchAll(TOKEN)) {
    const closes = token === "}" || token === "]";
    if (closes) depth -= 1;
    const opened = before === "{" || before === "[";
    if ((opened && !closes) || before === "," || (closes && !opened)) out += `\n${"  ".repeat(Math.min(depth, DEEPEST))}`;
    out += token === ":" ? ": " : token;
    if (token === "{" || token === "[") depth += 1;
    before = token;
  }
  return out;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
