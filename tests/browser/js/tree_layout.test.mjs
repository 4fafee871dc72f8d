// The tree of a session as rows and lanes: odd trees, long chains, and what keys do in them.
import assert from "node:assert/strict";
import { test } from "node:test";

const at = "../../../proxy/page/static/views/session/";
const { forksOf, layOut, nodesOf, unfoldFor } = await import(`${at}tree/tree_layout.js`);
const { keyAction, nextRow } = await import(`${at}tree/tree_keys.js`);
const { rowAt, scrollFor, shownRows, topsOf } = await import(`${at}tree/tree_window.js`);

let seq = 0;
const node = (id, parent = null, status = "complete") => ({ interaction_id: id, parent_id: parent, status, seq: (seq += 1) });
const shape = (nodes, folded) => layOut(nodes, folded).rows.map((row) => `${" ".repeat(row.lane)}${row.node.interaction_id}`);
const chain = (name, length, parent = null) =>
  Array.from({ length }, (_, index) => node(`${name}${index}`, index ? `${name}${index - 1}` : parent));

test("an empty session has no rows", () => assert.deepEqual(layOut([]), { rows: [], lanes: 0 }));

test("a chain of 5,000 turns is one straight line", () => {
  const { rows, lanes } = layOut(chain("n", 5000));
  assert.equal(lanes, 1);
  assert.deepEqual(rows.map((row) => row.parent), Array.from({ length: 5000 }, (_, index) => index - 1));
  assert.deepEqual([rows[0].up, rows[0].down, rows[4999].up, rows[4999].down], [false, true, true, false]);
});

test("roots alone stand below each other in the first lane", () => {
  const { rows, lanes } = layOut([node("a"), node("b"), node("c")]);
  assert.equal(lanes, 1);
  assert.ok(rows.every((row) => row.parent === -1 && !row.up && !row.side && !row.down && !row.orphan));
});

test("the longest branch goes on in its lane, whichever came first, and the others stand before it", () => {
  const nodes = [node("a"), node("short", "a"), node("end", "short"), ...chain("long", 4, "a")];
  assert.deepEqual(shape(nodes), ["a", " short", " end", "long0", "long1", "long2", "long3"]);
});

test("of branches of one length the first goes on", () => {
  assert.deepEqual(shape([node("a"), node("b", "a"), node("c", "a")]), ["a", " c", "b"]);
});

test("50 children take two lanes, and one of them goes on", () => {
  const { rows, lanes } = layOut([node("a"), ...Array.from({ length: 50 }, (_, index) => node(`c${index}`, "a"))]);
  assert.equal(lanes, 2);
  assert.equal(rows.filter((row) => row.side && row.lane === 1).length, 49);
  assert.deepEqual([rows[50].node.interaction_id, rows[50].lane, rows[50].up], ["c0", 0, true]);
});

test("a failed attempt never bends the line of the turn that came after it", () => {
  const nodes = [node("a"), node("bad", "a", "failed"), node("good", "a")];
  assert.deepEqual(shape(nodes), ["a", " bad", "good"]);
});

test("a failed node below a failed one stands below it", () => {
  assert.deepEqual(shape([node("a"), node("x", "a", "failed"), node("y", "x", "aborted"), node("b", "a")]), ["a", " x", " y", "b"]);
});

test("an orphan is a root that says so", () => {
  const { rows } = layOut([node("a"), node("b", "gone"), node("c", "b")]);
  assert.deepEqual(rows.map((row) => [row.node.interaction_id, row.orphan, row.parent]), [["a", false, -1], ["b", true, -1], ["c", false, 1]]);
});

test("a circle of parents is cut, and every node has one row", () => {
  const nodes = [node("a", "c"), node("b", "a"), node("c", "b"), node("self", "self"), node("tail", "c")];
  const { rows } = layOut(nodes);
  assert.deepEqual(rows.map((row) => row.node.interaction_id).sort(), ["a", "b", "c", "self", "tail"]);
  assert.ok(rows.every((row, index) => row.parent < index));
});

test("the same id twice is one row", () => assert.equal(layOut([node("a"), node("a")]).rows.length, 1));

test("a turn that forks at every step needs few lanes", () => {
  const nodes = [node("n1")];
  for (let index = 2; index < 2048; index += 1) nodes.push(node(`n${index}`, `n${index >> 1}`));
  const { rows, lanes } = layOut(nodes);
  assert.equal(rows.length, 2047);
  assert.ok(lanes <= 11, `${lanes} lanes`);
});

test("a folded node hides its side branches and says how many nodes they have", () => {
  const nodes = [node("a"), node("b", "a"), node("c", "b"), node("d", "a"), node("e", "d"), node("f", "e")];
  const { rows } = layOut(nodes, new Set(["a"]));
  assert.deepEqual(rows.map((row) => row.node.interaction_id), ["a", "d", "e", "f"]);
  assert.deepEqual([rows[0].branches, rows[0].hidden, rows[0].down], [1, 2, true]);
  assert.deepEqual(forksOf(nodes), ["a"]);
  assert.deepEqual(unfoldFor(nodes, "c"), ["a"]);
  assert.deepEqual(unfoldFor(nodes, "f"), []);
});

test("a running call is a node below its parent until it is among the interactions", () => {
  const call = { interaction_id: "r", parent_id: "a", here: true, output_tokens: 3, begun_at: 1 };
  const nodes = nodesOf({ interactions: [node("a")], running: [call] });
  assert.deepEqual(layOut(nodes).rows.map((row) => [row.node.status, row.parent]), [["complete", -1], ["running", 0]]);
  assert.equal(nodesOf({ interactions: [node("a"), node("r", "a")], running: [call] }).length, 2);
});

test("arrows go along the rows, to the parent and to the child, and fold and unfold", () => {
  const nodes = [node("a"), node("b", "a"), node("c", "b"), node("d", "a"), node("e", "d"), node("f", "e")];
  const { rows } = layOut(nodes);
  assert.deepEqual(keyAction("ArrowDown", rows, 0), { to: 1 });
  assert.deepEqual(keyAction("ArrowDown", rows, 5), { to: 5 });
  assert.deepEqual(keyAction("ArrowUp", rows, 0), { to: 0 });
  assert.deepEqual(keyAction("End", rows, 0), { to: 5 });
  assert.deepEqual(keyAction("Home", rows, 4), { to: 0 });
  assert.deepEqual(keyAction("ArrowLeft", rows, 0), { fold: "a" });
  assert.deepEqual(keyAction("ArrowLeft", rows, 2), { to: 1 });
  assert.deepEqual(keyAction("ArrowRight", rows, 1), { to: 2 });
  assert.equal(keyAction("ArrowRight", rows, 2), null);
  assert.equal(keyAction("x", rows, 2), null);
  assert.equal(keyAction("Home", [], -1), null);
  assert.deepEqual(keyAction("ArrowRight", layOut(nodes, new Set(["a"])).rows, 0), { unfold: "a" });
  assert.deepEqual(keyAction("ArrowDown", rows, -1), { to: 0 });
});

test("the next row that is wanted is looked for round the end", () => {
  const { rows } = layOut([node("a", null, "failed"), node("b"), node("c", null, "failed")]);
  const failed = (each) => each.status === "failed";
  assert.equal(nextRow(rows, 0, failed), 2);
  assert.equal(nextRow(rows, 2, failed), 0);
  assert.equal(nextRow(rows, 0, failed, -1), 2);
  assert.equal(nextRow(rows, 0, () => false), -1);
});

test("rows of different heights are found by their place", () => {
  const tops = topsOf([10, 30, 10], (height) => height);
  assert.deepEqual(tops, [0, 10, 40, 50]);
  assert.deepEqual([-5, 0, 9, 10, 39, 40, 500].map((y) => rowAt(tops, y)), [0, 0, 0, 1, 1, 2, 2]);
  assert.deepEqual(shownRows(tops, 12, 5, 0), [1, 2]);
  assert.deepEqual(shownRows([0], 0, 100), [0, 0]);
  assert.deepEqual([scrollFor(tops, 2, 0, 20), scrollFor(tops, 0, 25, 20), scrollFor(tops, 0, 0, 20)], [30, 0, 0]);
});

test("side branches stand below each other in the order in which they came", () => {
  const nodes = [node("a"), node("b", "a"), node("c", "a"), node("d", "a"), ...chain("long", 2, "a")];
  assert.deepEqual(shape(nodes), ["a", " b", " c", " d", "long0", "long1"]);
});

test("the left arrow leads from a folded node to its parent, also to the first row", () => {
  const nodes = [node("a"), node("b", "a"), node("c", "b"), node("d", "b"), node("e", "d")];
  const { rows } = layOut(nodes, new Set(["b"]));
  assert.deepEqual(keyAction("ArrowLeft", rows, 1), { to: 0 });
  assert.equal(keyAction("ArrowLeft", rows, 0), null);
});

test("the only row that is wanted is found from itself", () => {
  const { rows } = layOut([node("a"), node("b", null, "failed")]);
  assert.equal(nextRow(rows, 1, (each) => each.status === "failed"), 1);
});
