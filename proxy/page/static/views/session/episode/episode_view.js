// A session read from top to bottom: the turns of one path as one conversation, each message once. j and k go through it,
// and the address follows them.
import { plural, reward } from "../../../lib/format.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../../../lib/html.js";
import { KeysSwitch, useKeys } from "../../../lib/keys.js";
import { Loaded } from "../../../lib/notice.js";
import { printable } from "../../../lib/printable.js";
import { useReasons } from "../../../lib/reasons.js";
import { link, replace } from "../../../lib/route.js";
import { inWords } from "../../../lib/words.js";
import { MessageView } from "../turn/message.js";
import { Line } from "../turn/texts.js";
import { nodeNamed } from "../session_facts.js";
import { wordOf } from "../tree/tree_words.js";
import { drawnAround, hasAnswer, pathOf, runsOn, stopAt, stopsOf, turnsOf } from "./episode_model.js";
import { useAdded } from "./read_episode.js";

const STEP = 50; // turns that are drawn around the one that is read, and with each click
const SETTLED_MS = 150; // browsers refuse an address that changes with every repetition of a key
const MOST_WAYS = 8;
const ALWAYS = ["replay", "request_id", "idempotency_key", "sampled_by", "thread"]; // notes of every turn, which the turn itself shows

/**
 * `name`: the session id; `nodes`: its turns; `query.turn`: the turn to read through, by default of the longest path;
 * `query.way`: a turn of the path, if it is another one; `query.message`: the index of the message.
 */
export function EpisodeView({ name, query, nodes }) {
  const loaded = useAdded(name, nodes);
  return html`<div class="episode" aria-busy=${loaded.loading && loaded.data === undefined}>
    <${Loaded} what="Loading the conversation" from=${loaded}
      show=${(added) => html`<${Episode} name=${name} query=${query} nodes=${nodes} added=${added} />`} />
  </div>`;
}

function Episode({ name, query, nodes, added }) {
  const chosen = nodeNamed(nodes, query.turn)?.interaction_id;
  const path = useMemo(() => pathOf(nodes, query.way, chosen), [nodes, query.way, chosen]);
  const turns = useMemo(() => turnsOf(path, added), [path, added]);
  const stops = useMemo(() => stopsOf(turns), [turns]);
  const asked = stopAt(stops, turns.findIndex(({ node }) => node.interaction_id === chosen), query.message);
  const list = useRef(null);
  const place = useStop({ stops, turns, asked, name, query, list });
  const [open, setOpen] = useState(false);
  const reasons = useReasons();
  const { drawn, draw } = useDrawn(turns.length, stops[place.at]?.turn ?? 0, path[0]?.node.interaction_id);
  useKeys({ j: () => place.go(1), k: () => place.go(-1), o: () => setOpen(!open) });
  const onKeyDown = (event) => {
    if (event.key !== "Enter" || !event.target.matches(".turn-message")) return;
    event.preventDefault();
    toggleFolds(event.target);
  };
  return html`<p class="episode-help small quiet">
      <kbd>j</kbd> next message, <kbd>k</kbd> previous, <kbd>Enter</kbd> unfold it
      <button type="button" class="plain small" aria-pressed=${open} onClick=${() => setOpen(!open)}>Unfold tools and reasoning <kbd>o</kbd></button>
      <${KeysSwitch} />
      ${place.at >= 0 && html`<span class="tabular">${place.at + 1} of ${plural(stops.length, "message")}</span>`}
    </p>
    <div ref=${list} onKeyDown=${onKeyDown} onFocusIn=${place.focused}>
      <${More} count=${drawn.from} what="earlier" draw=${() => draw({ from: Math.max(0, drawn.from - STEP) })} />
      ${turns.slice(drawn.from, drawn.to).map((turn) => html`<${TurnPart} key=${turn.node.interaction_id} name=${name} query=${query} turn=${turn} open=${open} reasons=${reasons} />`)}
      <${More} count=${turns.length - drawn.to} what="later" draw=${() => draw({ to: Math.min(turns.length, drawn.to + STEP) })} />
      ${runsOn(path) && html`<p class="quiet small" role="status">A call runs. Its answer appears here once it has ended.</p>`}
    </div>`;
}

const More = ({ count, what, draw }) => count > 0 && html`<button type="button" class="turn-more" onClick=${draw}>
  Show ${Math.min(STEP, count)} of ${plural(count, `${what} turn`)}</button>`;

/** {drawn: {from, to}, draw(range)}: the turns that are drawn. The turn `at` always is; another `conversation` begins anew. */
function useDrawn(count, at, conversation) {
  const kept = useRef({ conversation: null, drawn: null });
  const [, again] = useState(0);
  const before = kept.current.conversation === conversation ? kept.current.drawn : null;
  const drawn = drawnAround(before, at, STEP, count);
  kept.current = { conversation, drawn };
  const draw = (range) => {
    kept.current.drawn = { ...drawn, ...range };
    again((number) => number + 1);
  };
  return { drawn, draw };
}

/**
 * {at, go(step), focused(event)}: the place in `stops` of the message that is read; -1 before the first one.
 *
 * `asked`: the place that the address names. Where the reader went goes into the address after a moment.
 */
function useStop({ stops, turns, asked, name, query, list }) {
  const [moved, setMoved] = useState(null);
  const wanted = useRef(asked > 0 ? { focus: false } : null);
  const at = moved === null ? asked : Math.min(moved, stops.length - 1);
  const arrived = useRef(query); // the address that the reader has seen, or made by a key
  const go = (step) => {
    wanted.current = { focus: true };
    setMoved(Math.min(stops.length - 1, Math.max(0, at + step)));
  };
  const focused = (event) => {
    const found = event.target.closest(".turn-message");
    const index = found ? stops.findIndex((stop) => String(stop.index) === found.dataset.message) : -1;
    if (index >= 0 && index !== at) setMoved(index);
  };
  useEffect(() => {
    if (moved === null || moved === asked || !stops[at]) return undefined;
    const timer = setTimeout(() => {
      const { turn, index } = stops[at];
      const next = { ...query, turn: turns[turn].node.interaction_id, way: turns.at(-1).node.interaction_id, message: String(index) };
      arrived.current = next;
      replace("session", name, next);
    }, SETTLED_MS);
    return () => clearTimeout(timer);
  }, [moved, asked, stops, query]);
  useEffect(() => {
    if (same(arrived.current, query)) return;
    arrived.current = query;
    if (asked >= 0) wanted.current = { focus: false };
    setMoved(null);
  }, [query]);
  useLayoutEffect(() => {
    const target = wanted.current && stops[at] && list.current.querySelector(`[data-message="${stops[at].index}"]`);
    if (!target) return;
    if (wanted.current.focus) target.focus({ preventScroll: true });
    target.scrollIntoView({ block: wanted.current.focus ? "nearest" : "start" });
    wanted.current = null;
  });
  return { at, go, focused };
}

const PLACE = ["turn", "way", "message"];
const same = (one, other) => PLACE.every((part) => (one[part] ?? "") === (other[part] ?? ""));

/** Open what is folded in a message; close it if all of it is open. */
function toggleFolds(message) {
  const folds = [...message.querySelectorAll("details")];
  const open = folds.some((fold) => !fold.open);
  for (const fold of folds) fold.open = open;
}

/** One turn: its number and what it is worth, other ways on from the turn before, what it brought, and its answer. */
function TurnPart({ name, query, turn, open, reasons }) {
  const { node, others, places, answer } = turn;
  return html`<section class="episode-turn" data-turn=${node.interaction_id} aria-label=${titleOf(node)}>
    <h2 class="turn-title"><a href=${to(name, query, node, "")}>${titleOf(node)}</a> ${worth(node)}${notes(node, reasons)}</h2>
    ${others.length > 0 && html`<p class="small quiet episode-others">
      ${node.parent_id === null ? "Other beginnings" : "Other ways on from here"}:
      ${others.slice(0, MOST_WAYS).map((other) => html` <a href=${to(name, query, other, query.show)} title=${reasons.reason?.[other.reason]}>${titleOf(other)} (${wordOf(other)})</a>`)}
      ${others.length > MOST_WAYS && ` and ${others.length - MOST_WAYS} more in the tree`}
    </p>`}
    ${node.error && html`<p class="warn small">${printable(node.error)}</p>`}
    <ol class="turn-messages">
      ${places.map((place) => html`<${MessageView} key=${place.index} place=${place} sessionId=${name} folded=${!open} />`)}
      ${hasAnswer(node, answer) && html`<${MessageView}
        key="answer" place=${answer} sessionId=${name} answer folded=${!open} prefill=${node.notes.prefill ?? 0} />`}
    </ol>
  </section>`;
}

/** The address of a turn in another part of the session, or of the conversation through it. */
const to = (name, query, node, show) => link("session", name, { ...query, show, turn: node.interaction_id, way: undefined, message: undefined });

const titleOf = (node) => (node.turn === null ? `${node.status} call` : `turn ${node.turn}`);

/** The reward of a turn, its named ones, and its return where that is another number. */
function worth(node) {
  const named = Object.entries(node.rewards ?? {}).map(([name, value]) => `${name} ${reward(value)}`);
  const own = node.reward === null || node.reward === undefined ? [] : [`reward ${reward(node.reward)}`];
  const discounted = node.return !== null && node.return !== undefined && node.return !== node.reward ? [`return ${reward(node.return)}`] : [];
  const said = [...own, ...named, ...discounted];
  return said.length ? html`<span class="episode-worth tabular"><${Line} text=${said.join(", ")} length=${160} /></span>` : null;
}

/** The names of what is exceptional about a turn; their values are in the turn. */
function notes(node, reasons) {
  const found = Object.keys(node.notes).filter((note) => !ALWAYS.includes(note));
  return found.length > 0 && html`<span class="episode-notes">notes: ${found.map((note, at) => html`${at > 0 && ", "}<span title=${reasons.notes?.[note]}>${inWords(note)}</span>`)}</span>`;
}
