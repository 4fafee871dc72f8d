// What a search for text found in a session: the first turn that has it, which a click opens.
import { html } from "../../lib/html.js";
import { link } from "../../lib/route.js";
import { Text } from "../../lib/text.js";

/** A column for entries with `matches`. */
export const FOUND = { name: "found", title: "Found", hint: "The first turn that has the text", width: "30%", cell: (row) => html`<${Found} row=${row} />` };

function Found({ row }) {
  const [first] = row.matches ?? [];
  if (!first) return html`<span class="quiet" title="It was found in a turn that is no longer there">–</span>`;
  const { before, match, after } = first.snippet;
  return html`<a class="sessions-found" href=${link("session", row.session_id, { turn: first.interaction_id })}>
    <${Text} text=${before.slice(-20)} /><mark><${Text} text=${match} /></mark><${Text} text=${after} />
  </a>`;
}
