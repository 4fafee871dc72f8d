// Where each interaction of a session stands in the drawing: one row each, and lanes that keep a conversation straight.
// The child with the most turns below it goes on in its parent's lane; the others stand between the two, a lane further
// right. So a lane is entered log2(turns) times at most, and a chain of any length is one line. Pure, and no recursion:
// a chain may have thousands of turns.

/**
 * The interactions of a session (of the API) and its running calls as nodes, in order of their end.
 * @param {{interactions: object[], running?: object[]}} tree
 * @returns {object[]} entries of the API; running ones have `status` "running", no `seq` and no `turn`
 */
export function nodesOf({ interactions, running = [] }) {
  const ended = new Set(interactions.map((node) => node.interaction_id));
  const calls = running.filter((call) => !ended.has(call.interaction_id));
  const more = { status: "running", turn: null, aligned: true, notes: {} };
  return [...interactions, ...calls.map((call) => ({ ...call, ...more }))];
}

/**
 * Rows from top to bottom. `folded`: ids of nodes whose side branches are hidden.
 * @param {object[]} nodes as `nodesOf` returns them
 * @param {Set<string>} folded
 * @returns {{rows: Row[], lanes: number}} Row: {node, lane, parent: index of its parent's row or -1, up: the parent's
 *   line comes from above, side: it comes from the lane to the left, down: its own line goes on, orphan: its parent is
 *   not known, branches: its side branches, hidden: nodes in them that are not shown}. Lanes left of `lane` pass the row.
 */
export function layOut(nodes, folded = new Set()) {
  const forest = grow(nodes);
  const rows = [], at = new Map();
  const stack = forest.roots.map((node) => ({ node, lane: 0, side: false })).reverse();
  while (stack.length) {
    const { node, lane, side } = stack.pop();
    const { parent, main, sides, orphan } = forest.at(node);
    const shown = folded.has(node.interaction_id) ? [] : sides;
    const hidden = shown.length ? 0 : sum(sides, (each) => forest.at(each).total);
    at.set(node.interaction_id, rows.length);
    const above = parent ? at.get(parent.interaction_id) : -1;
    const lines = { up: above >= 0 && !side, side, down: Boolean(main) };
    rows.push({ node, lane, parent: above, ...lines, orphan, branches: sides.length, hidden });
    if (main) stack.push({ node: main, lane, side: false });
    for (const each of [...shown].reverse()) stack.push({ node: each, lane: lane + 1, side: true });
  }
  return { rows, lanes: rows.reduce((most, row) => Math.max(most, row.lane + 1), 0) };
}

/** The ids of all nodes with side branches: what "fold all" folds. */
export function forksOf(nodes) {
  const forest = grow(nodes);
  return nodes.filter((node) => forest.at(node).sides.length).map((node) => node.interaction_id);
}

/** The ids of the nodes that must be unfolded so that this one is shown. */
export function unfoldFor(nodes, id) {
  const forest = grow(nodes), found = [];
  for (let node = forest.byId.get(id); node; node = forest.at(node).parent) {
    const { parent } = forest.at(node);
    if (parent && forest.at(parent).sides.includes(node)) found.push(parent.interaction_id);
  }
  return found;
}

/**
 * {byId, roots, main, at(node)}: the nodes as a forest. `main`: the root with the most turns, null without nodes. `at` gives
 * {parent, children, main, sides, complete, total, orphan} of a node: `main` is the child that goes on, `sides` the others.
 * A parent that is unknown, or that would close a circle, counts as none.
 */
export function grow(nodes) {
  const byId = new Map(nodes.map((node) => [node.interaction_id, node]));
  const known = [...byId.values()];
  const nothing = () => ({ parent: null, children: [], complete: 0, total: 1, orphan: false });
  const about = new Map(known.map((node) => [node, nothing()]));
  const circular = inCircles(known, byId);
  for (const node of known) {
    const parent = circular.has(node) ? undefined : byId.get(node.parent_id);
    about.get(node).orphan = Boolean(node.parent_id) && !parent;
    if (!parent) continue;
    about.get(node).parent = parent;
    about.get(parent).children.push(node);
  }
  const roots = known.filter((node) => !about.get(node).parent);
  measure(roots, about);
  return { byId, roots, main: largest(roots, about), at: (node) => about.get(node) };
}

/** Nodes at which a circle of parents is cut: the first of each that is come upon. */
function inCircles(nodes, byId) {
  const done = new Set(), cut = new Set();
  for (const start of nodes) {
    const path = new Set();
    let node = start;
    while (node && !done.has(node) && !path.has(node)) {
      path.add(node);
      node = byId.get(node.parent_id);
    }
    if (node && path.has(node)) cut.add(node);
    for (const each of path) done.add(each);
  }
  return cut;
}

/** Sizes from the leaves up, then for each node the child that goes on (`main`) and the others (`sides`). */
function measure(roots, about) {
  const order = [...roots];
  for (const node of order) order.push(...about.get(node).children); // grows while it is read: parents come first
  for (const node of order.reverse()) {
    const own = about.get(node);
    own.complete = (node.status === "complete" ? 1 : 0) + sum(own.children, (child) => about.get(child).complete);
    own.total = 1 + sum(own.children, (child) => about.get(child).total);
    own.main = largest(own.children, about);
    own.sides = own.children.filter((child) => child !== own.main);
  }
}

/** The node with the most turns in and below it, of equal ones the first; null of none. */
const largest = (nodes, about) =>
  nodes.reduce((best, node) => (best && !isLarger(about.get(node), about.get(best)) ? best : node), null);

const isLarger = (one, other) => (one.complete - other.complete || one.total - other.total) > 0;
const sum = (items, of) => items.reduce((total, item) => total + of(item), 0);
