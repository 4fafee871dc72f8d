// The conversation of a turn: what is new in it, then the answer. What its parent had is folded away, and counted.
import { plural } from "../../../lib/format.js";
import { html, useMemo, useState } from "../../../lib/html.js";
import { link } from "../../../lib/route.js";
import { MessageView } from "./message.js";
import { linked } from "./messages.js";

const STEP = 40;

/** `turn`: with its messages. `query`: of the address. */
export function Conversation({ turn, query }) {
  const places = useMemo(() => linked([...turn.messages, turn.output]), [turn]);
  const { count, title, heading } = known(turn);
  const fresh = places.slice(count, -1);
  const before = link("session", turn.session_id, { ...query, turn: turn.parent_id });
  return html`<section aria-label="Conversation">
    ${count > 0 && html`<${Earlier} places=${places.slice(0, count)} title=${title} sessionId=${turn.session_id} />`}
    <h2 class="turn-title">${heading}${plural(fresh.length, "message")}
      ${turn.parent_id !== null && html` <span class="turn-after">after <a href=${before}>the turn before</a></span>`}</h2>
    <${Some} places=${fresh} sessionId=${turn.session_id} />
    <${Answer} turn=${turn} place=${places.at(-1)} />
  </section>`;
}

/**
 * How many messages another turn had before: {count, title, heading}. It is the turn before this one, whose answer is
 * the last of them; or for a fork the nearest turn, if it agrees with more of them.
 */
function known({ inherited, compared }) {
  const same = compared.message?.index ?? 0;
  if (same > inherited) return { count: same, title: "as the nearest turn had them", heading: "From the first that differs: " };
  return { count: inherited, title: "that the turn before had, its answer included", heading: inherited > 0 ? "New in this turn: " : "" };
}

/** Messages that are known from another turn. They are drawn when somebody opens them. */
function Earlier({ places, title, sessionId }) {
  const [open, setOpen] = useState(false);
  return html`<details class="turn-earlier" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${plural(places.length, "earlier message")} <span class="quiet small">${title}</span></summary>
    ${open && html`<${Some} places=${places} sessionId=${sessionId} last />`}
  </details>`;
}

/** Messages in a list; of many, a part. `last`: the last ones are shown, since they are the nearest. */
function Some({ places, sessionId, last = false }) {
  const [count, setCount] = useState(STEP);
  const hidden = Math.max(0, places.length - count);
  const shown = last ? places.slice(hidden) : places.slice(0, count);
  const more = hidden > 0 && html`<button type="button" class="turn-more" onClick=${() => setCount(count + STEP)}>
    Show ${Math.min(STEP, hidden)} more of ${plural(hidden, "message")}
  </button>`;
  return html`${last && more}
    <ol class="turn-messages">${shown.map((place) => html`<${MessageView} key=${place.index} place=${place} sessionId=${sessionId} />`)}</ol>
    ${!last && more}`;
}

function Answer({ turn, place }) {
  const { output } = turn;
  if (output.content === "" && !output.tool_calls && !output.reasoning_content && turn.status !== "complete") {
    return html`<p class="turn-empty quiet">This turn has no answer.</p>`;
  }
  return html`<ol class="turn-messages"><${MessageView} place=${place} sessionId=${turn.session_id} answer prefill=${turn.notes.prefill ?? 0} /></ol>`;
}
