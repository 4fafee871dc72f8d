// Two sessions side by side: what differs in their figures, and in their conversations from where they part.
import { get } from "../../lib/api.js";
import { duration, number, plural, reward, shorten } from "../../lib/format.js";
import { html, useMemo, useRef, useState } from "../../lib/html.js";
import { useLoad } from "../../lib/load.js";
import { Failure, Loaded, Waiting } from "../../lib/notice.js";
import { printable } from "../../lib/printable.js";
import { go, link } from "../../lib/route.js";
import { Text, Short } from "../../lib/text.js";
import { useTitle } from "../../lib/title.js";
import { Unfold } from "../../lib/unfold.js";
import { pathThrough, turnsOf } from "../session/episode/episode_model.js";
import { useAdded } from "../session/episode/read_episode.js";
import { sorted } from "../groups/sorting.js";
import { useSession } from "../session/session_data.js";
import { Difference } from "../session/turn/difference.js";
import { MessageView } from "../session/turn/message.js";
import { messageText } from "../session/turn/messages.js";
import { figures, messagesOf, parted, ranks } from "./compare_model.js";

const STEP = 40;
const MOST_OFFERED = 1000;

/** `query.a`, `query.b`: session ids. Without `b`, the page offers the sessions of the group of `a`. */
export function CompareView({ query }) {
  useTitle(query.b ? `${query.a} and ${query.b}` : "Compare");
  if (!query.a || !query.b) return html`<${Choice} query=${query} />`;
  return html`<${Both} key=${JSON.stringify([query.a, query.b])} query=${query} />`;
}

/** Which session to compare with: typed, or one of the same group. */
function Choice({ query }) {
  const [a, setA] = useState(query.a ?? "");
  const [b, setB] = useState("");
  const send = (event) => {
    event.preventDefault();
    go("compare", "", { a: a.trim(), b: b.trim() });
  };
  return html`<h1>Compare two sessions</h1>
    <form class="compare-choice card" onSubmit=${send}>
      <label>Session<input value=${a} required spellcheck=${false} onInput=${(event) => setA(event.target.value)} /></label>
      <label>with<input value=${b} required spellcheck=${false} onInput=${(event) => setB(event.target.value)} /></label>
      <button type="submit" class="primary">Compare</button>
    </form>
    ${query.a && html`<${OfGroup} name=${query.a} />`}`;
}

/** The other sessions of a session's group, the best first. */
function OfGroup({ name }) {
  const loaded = useLoad(({ signal }) => readGroup(name, signal), [name]);
  return html`<${Loaded} what="Loading the group" from=${loaded} show=${(found) => html`<${Others} name=${name} ...${found} />`} />`;
}

function Others({ name, group, others, more }) {
  if (group === null) return html`<p class="quiet">This session has no group.</p>`;
  const words = ranks(others);
  return html`<h2>Sessions of the group <${Short} text=${group} /></h2>
    ${others.length === 0 && html`<p class="quiet">It has no other session.</p>`}
    ${more && html`<p class="quiet small">The group is larger: these are of its first ${number(MOST_OFFERED)} sessions.</p>`}
    <ul class="compare-others">${others.map((each, at) => html`<li key=${each.session_id}>
      <a href=${link("compare", "", { a: name, b: each.session_id })}><${Short} text=${each.session_id} /></a>
      <span class="quiet"> score ${reward(each.summary.score)}, ${plural(each.summary.turns, "turn")}, ${each.status}</span>
      ${words[at] && html` <strong>${words[at]}</strong>`}
    </li>`)}</ul>`;
}

async function readGroup(name, signal) {
  const own = await get("/rl/sessions", { filter: JSON.stringify({ session_ids: [name] }) }, { signal });
  const group = own.sessions[0]?.group_id ?? null;
  if (group === null) return { group, others: [], more: false };
  const filter = JSON.stringify({ group_id: group });
  const { sessions, cursor } = await get("/rl/sessions", { filter, include: "summary", limit: MOST_OFFERED }, { signal });
  return { group, others: sorted(sessions.filter((each) => each.session_id !== name), "score"), more: cursor !== null };
}

function Both({ query }) {
  const [one, other] = [useSide(query.a), useSide(query.b)];
  const heading = html`<h1 class="compare-title"><a href=${link("session", query.a)}><${Short} text=${query.a} length=${40} class="" /></a>
    <span class="quiet"> and </span><a href=${link("session", query.b)}><${Short} text=${query.b} length=${40} class="" /></a></h1>
    <p class="small"><a href=${link("compare", "", { a: query.a })}>Compare with another session</a></p>`;
  const failed = one.error ?? other.error;
  if (failed) return html`${heading}<${Failure} what="Reading the sessions" error=${failed} retry=${() => [one, other].forEach((side) => side.reload())} />`;
  if (!one.turns || !other.turns) return html`${heading}<${Waiting} text="Loading both sessions…" />`;
  return html`${heading}<${Figures} names=${[query.a, query.b]} rows=${figures(one, other)} />
    <${Conversations} names=${[query.a, query.b]} one=${one.turns} other=${other.turns} />`;
}

/** A session with its longest conversation: {tree, nodes, turns, error, reload}; `turns` is undefined until all is read. */
function useSide(name) {
  const { tree, nodes, error, reload } = useSession(name);
  const added = useAdded(name, nodes);
  const turns = useMemo(() => (tree && added.data ? turnsOf(pathThrough(nodes), added.data) : undefined), [nodes, added.data]);
  return { tree, nodes, turns, error: error ?? added.error, reload: () => [reload, added.reload].forEach((again) => again()) };
}

const FIRST = ["score", "status"];

/** The scores and what differs; what is the same can be opened. */
function Figures({ names, rows }) {
  const first = rows.filter(({ name, differs }) => differs || FIRST.includes(name));
  const rest = rows.filter((row) => !first.includes(row));
  return html`<${FigureTable} label="Figures that differ" names=${names} rows=${first} />
    ${rest.length > 0 && html`<${Unfold} title=${rest.length === 1 ? "1 figure is the same" : `${number(rest.length)} figures are the same`}><${FigureTable} label="Figures that are the same" names=${names} rows=${rest} /><//>`}`;
}

const FigureTable = ({ label, names, rows }) => html`<table class="card compare-figures" aria-label=${label}>
    <thead><tr><th scope="col">figure</th>${names.map((name) => html`<th scope="col"><${Short} text=${name} class="" /></th>`)}</tr></thead>
    <tbody>${rows.map(({ name, values, differs }) => html`<tr key=${name} class=${differs ? "compare-differs" : ""}>
      <th scope="row"><${Text} text=${name} />${differs && html`<span class="visually-hidden"> differs</span>`}</th>
      ${values.map((value) => html`<td class="tabular"><${Text} text=${shown(name, value)} /></td>`)}</tr>`)}</tbody>
  </table>`;

function shown(name, value) {
  if (value === null || value === undefined) return "–";
  if (name === "score") return reward(value);
  if (name === "duration") return duration(value);
  if (typeof value === "number") return number(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** `one`, `other`: the turns of both, as `turnsOf` gives them. */
function Conversations({ names, one, other }) {
  const [left, right] = useMemo(() => [one, other].map(messagesOf), [one, other]);
  const { same, rows } = useMemo(() => parted(left, right), [left, right]);
  const [drawn, setDrawn] = useState(STEP);
  const heading = useRef(null);
  const jump = () => {
    heading.current.focus({ preventScroll: true });
    heading.current.scrollIntoView({ block: "start" });
  };
  if (rows.length === 0) return html`<p>Both conversations are the same: ${plural(same, "message")}.</p>`;
  const equal = left.slice(0, same);
  return html`<p class="compare-jump"><button type="button" onClick=${jump}>Go to the first difference</button>
      <span class="small quiet"> Of a session that forked, the path with the most turns is compared.</span></p>
    ${same > 0 && html`<${Unfold} title=${same === 1 ? "The first message is equal" : `The first ${number(same)} messages are equal`}>
      ${same > STEP && html`<p class="small"><a href=${link("session", names[0], { show: "conversation" })}>Read from the beginning</a>; below are the last ${number(STEP)} of them.</p>`}
      <ol class="turn-messages">${equal.slice(-STEP).map(({ place }) => html`<${MessageView} key=${place.index} place=${place} sessionId=${names[0]} folded />`)}</ol>
    <//>`}
    <h2 ref=${heading} tabindex="-1">${where(same)}</h2>
    <ol class="compare-rows">${rows.slice(0, drawn).map((row, index) => html`<${Row} key=${index} names=${names} row=${row} open=${index === 0} />`)}</ol>
    ${rows.length > drawn && html`<button type="button" class="turn-more" onClick=${() => setDrawn(drawn + STEP)}>Show ${Math.min(STEP, rows.length - drawn)} more of ${plural(rows.length - drawn, "message")}</button>`}`;
}

const where = (same) => ["They differ from the first message on", "They differ after the first message"][same] ?? `They differ after the first ${number(same)} messages`;

/** The place of a message in the conversation of its session. */
const placeOf = (name, { turn, place }) => link("session", name, { show: "conversation", turn, message: place.index });

/** A message of both. `open`: whether the words that differ are shown at once. */
function Row({ names, row, open }) {
  const sides = [row.one, row.other];
  const texts = sides.map((side) => (side ? messageText(side.message) : ""));
  const comparable = row.one && row.other && !row.equal && row.one.message.role === row.other.message.role;
  return html`<li class=${row.equal ? "compare-row compare-equal" : "compare-row"}>
    <div class="compare-sides">${sides.map((side, at) => html`<div class="compare-side">
      ${side ? html`<ol class="turn-messages"><${MessageView} place=${side.place} sessionId=${names[at]} folded=${row.equal ? true : null} /></ol>
        <a class="small" href=${placeOf(names[at], side)}>in its conversation${side.number === null ? "" : `, turn ${side.number}`}</a>` : html`<p class="quiet small">no message here</p>`}
    </div>`)}</div>
    ${comparable && html`<${Unfold} title="Word by word" open=${open}>
      <${Difference} recorded=${texts[0]} sent=${texts[1]} names=${{ recorded: shorten(printable(names[0], { line: true })), sent: shorten(printable(names[1], { line: true })) }} /><//>`}
  </li>`;
}
