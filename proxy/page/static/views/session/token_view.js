// Every token of a turn's path as a cell.
import { html } from "../../lib/html.js";

/** `sessionId`; `turn`: an interaction id or a turn number; `query`: of the address. */
export function TokenView({ sessionId, turn, query }) {
  return html`<section>tokens of ${turn}</section>`;
}
