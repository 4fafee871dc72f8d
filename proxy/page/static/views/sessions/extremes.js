// Links to the sessions with the lowest and the highest rewards of those that a query of the list selects.
import { html } from "../../lib/html.js";
import { link } from "../../lib/route.js";

const FEW = "10";

/** `query`: filters of the list of sessions. */
export function Extremes({ query }) {
  const few = (order) => link("sessions", "", { ...query, order, first: FEW });
  return html`<a href=${few("reward")}>ten worst</a> · <a href=${few("-reward")}>ten best</a>`;
}
