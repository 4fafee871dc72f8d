// An episode as one conversation: the turns of one path of the tree, each message once. Pure: no DOM.
import { grow } from "../tree/tree_layout.js";
import { linked } from "../turn/messages.js";

/**
 * The turns from the root to the turn `id`, and on from it along the line that the tree draws through it.
 * @param {object[]} nodes as `nodesOf` returns them
 * @param {string|undefined} id of a node; by default the root with the most turns
 * @returns {{node: object, others: object[]}[]} `others`: the nodes that continue the same turn in another way
 */
export function pathThrough(nodes, id) {
  const forest = grow(nodes);
  const path = [];
  for (let node = forest.byId.get(id); node; node = forest.at(node).parent) path.unshift(node);
  for (let next = path.length ? forest.at(path.at(-1)).main : forest.main; next; next = forest.at(next).main) path.push(next);
  return path.map((node) => {
    const { parent } = forest.at(node);
    return { node, others: (parent ? forest.at(parent).children : forest.roots).filter((each) => each !== node) };
  });
}

/**
 * The turns of a path with their messages: {node, others, places, answer}, as `linked` gives places. `added`: by id, what
 * `include=added` gives; a turn without it (a running call) has no messages.
 */
export function turnsOf(path, added) {
  const own = path.map(({ node }) => {
    const part = added.get(node.interaction_id);
    return part ? [...part.messages, part.output] : [];
  });
  const places = linked(own.flat());
  let at = 0;
  return path.map((step, index) => {
    const mine = places.slice(at, (at += own[index].length));
    return { ...step, places: mine.slice(0, -1), answer: mine.at(-1) };
  });
}

/** The messages of both paths that are equal from the beginning on: how many. Ids of calls do not count. */
export function sameBeginning(one, other) {
  const most = Math.min(one.length, other.length);
  let count = 0;
  while (count < most && sameMessage(one[count], other[count])) count += 1;
  return count;
}

/** Whether two messages say the same. Ids of calls differ from session to session. */
export const sameMessage = (one, other) => JSON.stringify(said(one)) === JSON.stringify(said(other));

const said = ({ role, content, reasoning_content, tool_calls, images }) => [
  role, content, reasoning_content ?? null, (tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]),
  (images ?? []).map(({ digest, at }) => [digest, at]),
];

/**
 * The path that an address names: that of `way`, a node of it, if the turn `id` is on it; else the one through `id`. So the
 * conversation stays the same while a reader goes back in it to where another one begins. Both may be undefined.
 */
export function pathOf(nodes, way, id) {
  const named = nodes.some((node) => node.interaction_id === way) ? pathThrough(nodes, way) : [];
  return named.some(({ node }) => id === undefined || node.interaction_id === id) ? named : pathThrough(nodes, id);
}

/**
 * The messages of turns in order, as {turn: its place in `turns`, index: of the message}. Only what is shown: a call that
 * failed before its first token has no answer.
 */
export const stopsOf = (turns) =>
  turns.flatMap(({ node, places, answer }, turn) => [...places, ...(hasAnswer(node, answer) ? [answer] : [])].map(({ index }) => ({ turn, index })));

/** Whether a turn has an answer to show. */
export const hasAnswer = (node, answer) =>
  Boolean(answer) && (node.status === "complete" || answer.message.content !== "" || Boolean(answer.message.tool_calls?.length || answer.message.reasoning_content));

/** The stop of a turn that an address names by the text of an `index`; the first of the turn without it, -1 without a turn. */
export function stopAt(stops, turn, index) {
  const asked = stops.findIndex((stop) => stop.turn === turn && String(stop.index) === index);
  return asked >= 0 ? asked : stops.findIndex((stop) => stop.turn === turn);
}

/** The turns to draw, [from, to): those that are drawn already, and `step` on either side of the turn `at`. */
export function drawnAround(drawn, at, step, count) {
  const [from, to] = drawn === null || at < drawn.from - step || at > drawn.to + step ? [at, at] : [drawn.from, drawn.to];
  return { from: Math.max(0, at < from + 1 ? at - step : from), to: Math.min(count, at > to - 2 ? at + step : to) };
}

/** Whether a path has a call that runs at its end. */
export const runsOn = (path) => path.at(-1)?.node.status === "running";
