// Commands to copy. A key is never in them: the shell puts $TOKENGROVE_ADMIN_KEY there. Pure: no DOM.

const KEY = ' \\\n  -H "authorization: Bearer $TOKENGROVE_ADMIN_KEY"';
// Characters that a terminal would act on, or that would show another command than is run. In JSON they are escaped.
const ESCAPED = /[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|[\u{e0000}-\u{e007f}]/gu;

/** A word for a POSIX shell that stands for exactly this text. */
export const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** `curl` for a GET. `url`: a URL or its text; `withKey`: whether the server asks for a key. */
export const readCommand = (url, withKey) => `curl -s ${quoted(String(url))}${withKey ? KEY : ""}\n`;

/** `curl` for a POST of JSON. The body is a here-document: a command line has room for some 100 kB only. */
export function sendCommand(url, body, withKey) {
  const head = `curl -s ${quoted(String(url))}${withKey ? KEY : ""} \\\n  -H 'content-type: application/json' --data-binary @- <<'JSON'`;
  return `${head}\n${json(body)}\nJSON\n`;
}

/** JSON on one line, of which nothing acts on a terminal. */
export const json = (value) => JSON.stringify(value).replace(ESCAPED, escaped);

const escaped = (text) => [...text].flatMap(units).join("");
const units = (character) => Array.from({ length: character.length }, (_, at) => `\\u${character.charCodeAt(at).toString(16).padStart(4, "0")}`);
