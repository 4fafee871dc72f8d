// An episode as one conversation: the turns of one path of the tree, each message once. Pure: no DOM.
import { linked } from "../turn/messages.js";

/**
 * The complete and failed turns from the root to the turn `id`, and on from it along its longest continuation.
 * @param {object[]} nodes as `nodesOf` returns them
 * @param {string|undefined} id of a node; by default the longest path of the session
 * @returns {{node: object, others: object[]}[]} `others`: the nodes that continue the same turn in another way
 */
export function pathThrough(nodes, id) {
  const byId = new Map(nodes.map((node) => [node.interaction_id, node]));
  const children = new Map();
  for (const node of nodes) {
    const parent = byId.has(node.parent_id) ? node.parent_id : null;
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  const depth = depths(nodes, byId);
  const ends = children.get(null) ?? [];
  const chosen = byId.get(id);
  const path = [];
  for (let node = chosen; node; node = byId.get(node.parent_id)) path.unshift(node);
  for (let next = deepest(chosen ? children.get(chosen.interaction_id) ?? [] : ends, depth); next; next = deepest(children.get(next.interaction_id) ?? [], depth)) {
    path.push(next);
  }
  return path.map((node) => {
    const siblings = children.get(byId.has(node.parent_id) ? node.parent_id : null);
    return { node, others: siblings.filter((each) => each !== node) };
  });
}

/** The node with the longest way below it; of equal ones the last, which is the newest. */
const deepest = (nodes, depth) =>
  nodes.reduce((best, node) => (best && depth.get(best.interaction_id) > depth.get(node.interaction_id) ? best : node), undefined);

/** The number of turns from each node to the end of its longest continuation. A parent stands before its children. */
function depths(nodes, byId) {
  const found = new Map(nodes.map((node) => [node.interaction_id, node.status === "complete" ? 1 : 0]));
  for (const node of [...nodes].reverse()) {
    const parent = byId.get(node.parent_id);
    if (!parent) continue;
    const own = parent.status === "complete" ? 1 : 0;
    found.set(parent.interaction_id, Math.max(found.get(parent.interaction_id), found.get(node.interaction_id) + own));
  }
  return found;
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
  (images ?? []).map((image) => image.sha256 ?? image),
];
