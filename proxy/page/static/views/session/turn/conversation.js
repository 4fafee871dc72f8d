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
  const fresh = places.slice(turn.inherited, -1);
  return html`<section aria-label="Conversation">
    ${turn.inherited > 0 && html`<${Earlier} places=${places.slice(0, turn.inherited)} turn=${turn} query=${query} />`}
    <h2 class="turn-title">${turn.inherited > 0 ? `New in this turn: ${plural(fresh.length, "message")}` : plural(fresh.length, "message")}</h2>
    <${Some} places=${fresh} />
    <${Answer} turn=${turn} place=${places.at(-1)} />
  </section>`;
}

/** The messages that the parent had, its answer included. They are drawn when somebody opens them. */
function Earlier({ places, turn, query }) {
  const [open, setOpen] = useState(false);
  const parent = link("session", turn.session_id, { ...query, turn: turn.parent_id });
  return html`<details class="turn-earlier" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${plural(places.length, "earlier message")} <span class="quiet small">that the turn before had, its answer included ·
      <a href=${parent}>the turn before</a></span></summary>
    ${open && html`<${Some} places=${places} last />`}
  </details>`;
}

/** Messages in a list; of many, a part. `last`: the last ones are shown, since they are the nearest. */
function Some({ places, last = false }) {
  const [count, setCount] = useState(STEP);
  const hidden = Math.max(0, places.length - count);
  const shown = last ? places.slice(hidden) : places.slice(0, count);
  const more = hidden > 0 && html`<button type="button" class="turn-more" onClick=${() => setCount(count + STEP)}>
    Show ${Math.min(STEP, hidden)} more of ${plural(hidden, "message")}
  </button>`;
  return html`${last && more}
    <ol class="turn-messages">${shown.map((place) => html`<${MessageView} key=${place.index} place=${place} />`)}</ol>
    ${!last && more}`;
}

function Answer({ turn, place }) {
  const { output } = turn;
  if (output.content === "" && !output.tool_calls && !output.reasoning_content && turn.status !== "complete") {
    return html`<p class="turn-empty quiet">This turn has no answer.</p>`;
  }
  return html`<ol class="turn-messages"><${MessageView} place=${place} answer prefill=${turn.notes.prefill ?? 0} /></ol>`;
}
