// One turn: its messages, timing, and what it differs in.
import { html } from "../../lib/html.js";

/** `sessionId`; `turn`: an interaction id or a turn number; `query`: of the address. */
export function TurnPanel({ sessionId, turn, query }) {
  return html`<section>turn ${turn}</section>`;
}
