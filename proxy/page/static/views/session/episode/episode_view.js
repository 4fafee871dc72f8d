// A session read from top to bottom: the turns of one path as one conversation, each message once. j and k go through it.
import { get, inPath } from "../../../lib/api.js";
import { plural, reward } from "../../../lib/format.js";
import { html, useEffect, useMemo, useRef, useState } from "../../../lib/html.js";
import { useKeys } from "../../../lib/keys.js";
import { useLoad } from "../../../lib/load.js";
import { Loaded } from "../../../lib/notice.js";
import { link, replace } from "../../../lib/route.js";
import { MessageView } from "../turn/message.js";
import { pathThrough, turnsOf } from "./episode_model.js";

const DRAWN = 100; // turns at first, and with each click

/** `name`: the session id; `nodes`: its turns; `query.turn`: the turn to read through; by default the longest path. */
export function EpisodeView({ name, query, nodes }) {
  const ended = nodes.filter((node) => node.status !== "running").length;
  const loaded = useLoad(({ signal }) => readAdded(name, signal), [name, ended], { keep: true });
  return html`<div class="episode" aria-busy=${loaded.loading}>
    <${Loaded} what="Loading the conversation" from=${loaded}
      show=${(added) => html`<${Episode} name=${name} query=${query} nodes=${nodes} added=${added} />`} />
  </div>`;
}

/** What each turn of a session brought, by its id: {messages, output}. */
export async function readAdded(name, signal) {
  const { interactions } = await get(`/rl/sessions/${inPath(name)}`, { include: "added" }, { signal });
  return new Map(interactions.map((turn) => [turn.interaction_id, turn.added]));
}

function Episode({ name, query, nodes, added }) {
  const chosen = nodes.find((node) => node.interaction_id === query.turn || String(node.turn) === query.turn)?.interaction_id;
  const turns = useMemo(() => turnsOf(pathThrough(nodes, chosen), added), [nodes, chosen, added]);
  const at = Math.max(0, turns.findIndex(({ node }) => node.interaction_id === chosen));
  const [drawn, setDrawn] = useState(DRAWN);
  const [open, setOpen] = useState(false);
  const list = useRef(null);
  const count = Math.max(drawn, at + DRAWN);
  const here = useRef(chosen); // where the reader went by a key is where they are already
  useEffect(() => {
    if (chosen === here.current) return;
    here.current = chosen;
    list.current.querySelector(`[data-turn="${CSS.escape(chosen ?? "")}"]`)?.scrollIntoView({ block: "start" });
  }, [chosen]);
  const message = useRef(-1); // the one that was gone to by a key
  const go = (step) => {
    const items = [...list.current.querySelectorAll(".turn-message")];
    const focused = items.findIndex((item) => item.contains(document.activeElement));
    message.current = Math.min(items.length - 1, Math.max(0, (focused < 0 ? message.current : focused) + step));
    const next = items[message.current];
    if (!next) return;
    here.current = next.closest("[data-turn]").dataset.turn;
    next.focus({ preventScroll: true });
    next.scrollIntoView({ block: "nearest" });
    if (here.current !== chosen) replace("session", name, { ...query, turn: here.current });
  };
  useEffect(() => {
    if (message.current >= 0) go(0); // unfolding drew the message anew
  }, [open]);
  useKeys({ j: () => go(1), k: () => go(-1), o: () => setOpen(!open) });
  return html`<p class="episode-help small quiet">
      <kbd>j</kbd> next message, <kbd>k</kbd> previous
      <button type="button" class="plain" aria-pressed=${open} onClick=${() => setOpen(!open)}>Unfold tools and reasoning <kbd>o</kbd></button>
    </p>
    <div ref=${list}>
      ${turns.slice(0, count).map((turn) => html`<${TurnPart} key=${turn.node.interaction_id} name=${name} query=${query} turn=${turn} open=${open} />`)}
    </div>
    ${turns.length > count && html`<button type="button" class="turn-more" onClick=${() => setDrawn(count + DRAWN)}>
      Show ${Math.min(DRAWN, turns.length - count)} more of ${plural(turns.length - count, "turn")}
    </button>`}`;
}

/** One turn: its number and what it is worth, other ways on from the turn before, what it brought, and its answer. */
function TurnPart({ name, query, turn, open }) {
  const { node, others, places, answer } = turn;
  return html`<section class="episode-turn" data-turn=${node.interaction_id} aria-label=${titleOf(node)}>
    <h2 class="turn-title"><a href=${link("session", name, { ...query, show: "", turn: node.interaction_id })}>${titleOf(node)}</a> ${worth(node)}</h2>
    ${others.length > 0 && html`<p class="small quiet episode-others">
      ${node.parent_id === null ? "Other beginnings" : "Other ways on from here"}:
      ${others.map((other) => html` <a href=${link("session", name, { ...query, turn: other.interaction_id })}>${titleOf(other)}</a>`)}
    </p>`}
    ${node.error && html`<p class="warn small">${node.error.message ?? node.error}</p>`}
    <ol class="turn-messages">
      ${places.map((place) => html`<${MessageView} key=${`${place.index} ${open}`} place=${place} sessionId=${name} folded=${!open} />`)}
      ${answer && (node.status === "complete" || answer.message.content !== "") && html`<${MessageView}
        key=${`answer ${open}`} place=${answer} sessionId=${name} answer folded=${!open} prefill=${node.notes.prefill ?? 0} />`}
    </ol>
  </section>`;
}

const titleOf = (node) => (node.turn === null ? `${node.status} call` : `turn ${node.turn}`);

/** The reward of a turn, its named ones, and its return where that is another number. */
function worth(node) {
  const named = Object.entries(node.rewards ?? {}).map(([name, value]) => `${name} ${reward(value)}`);
  const own = node.reward === null || node.reward === undefined ? [] : [`reward ${reward(node.reward)}`];
  const discounted = node.return !== null && node.return !== undefined && node.return !== node.reward ? [`return ${reward(node.return)}`] : [];
  const said = [...own, ...named, ...discounted];
  return said.length ? html`<span class="episode-worth tabular">${said.join(", ")}</span>` : null;
}
