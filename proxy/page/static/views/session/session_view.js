// One session: its tree, and the turn that is chosen.
import { html } from "../../lib/html.js";
import { TokenView } from "./token_view.js";
import { TurnPanel } from "./turn_panel.js";

/** `name`: the session id. `query.turn`: the interaction id (or turn number) that is shown. `query.show`: the part of it. */
export function SessionView({ name, query }) {
  return html`<h1>${name}</h1>
    ${query.turn && query.show === "tokens"
      ? html`<${TokenView} sessionId=${name} turn=${query.turn} query=${query} />`
      : html`<${TurnPanel} sessionId=${name} turn=${query.turn} query=${query} />`}`;
}
