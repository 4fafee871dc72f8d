// An episode as one conversation, and two of them next to each other.
import assert from "node:assert/strict";
import test from "node:test";
import { isCommand } from "../../../proxy/page/static/lib/command_key.js";
import { drawnAround, pathOf, pathThrough, sameBeginning, stopAt, stopsOf, turnsOf } from "../../../proxy/page/static/views/session/episode/episode_model.js";
import { lastMain, replaced, rewardBody } from "../../../proxy/page/static/views/session/reward_words.js";
import { sorted } from "../../../proxy/page/static/views/groups/sorting.js";
import { figures, messagesOf, parted, ranks } from "../../../proxy/page/static/views/compare/compare_model.js";

const node = (id, parent, more = {}) => ({ interaction_id: id, parent_id: parent, status: "complete", notes: {}, output_tokens: 1, prompt_tokens: 1, ...more });
const ids = (path) => path.map(({ node }) => node.interaction_id);
const say = (role, content, more = {}) => ({ role, content, ...more });

test("without a choice the line of the tree with the most turns is read, and of equal ones the first", () => {
  const nodes = [node("a", null), node("title", null), node("b", "a"), node("c", "b"), node("d", "b")];
  assert.deepEqual(ids(pathThrough(nodes)), ["a", "b", "c"]);
  assert.deepEqual(ids(pathThrough([...nodes, node("e", "d")])), ["a", "b", "d", "e"]);
  assert.deepEqual(ids(pathThrough([])), []);
});

test("a chosen turn is read with all before it and with its longest continuation, and the others are named", () => {
  const nodes = [node("a", null), node("b", "a"), node("c", "a"), node("d", "c"), node("e", "d")];
  const path = pathThrough(nodes, "b");
  assert.deepEqual(ids(path), ["a", "b"]);
  assert.deepEqual(path[1].others.map((other) => other.interaction_id), ["c"]);
  assert.deepEqual(ids(pathThrough(nodes, "c")), ["a", "c", "d", "e"]);
});

test("a failed call ends a path only where nothing else goes on", () => {
  const failed = node("f", "a", { status: "failed" });
  assert.deepEqual(ids(pathThrough([node("a", null), node("b", "a"), failed])), ["a", "b"]);
  assert.deepEqual(ids(pathThrough([node("a", null), failed])), ["a", "f"]);
});

test("parents in a circle end a path, as they do in the tree", () => {
  assert.deepEqual(ids(pathThrough([node("a", "b"), node("b", "a")], "b")), ["a", "b"]);
});

test("a path of ten thousand turns is found without recursion", () => {
  const nodes = Array.from({ length: 10_000 }, (_, index) => node(`n${index}`, index ? `n${index - 1}` : null));
  assert.equal(pathThrough(nodes).length, 10_000);
});

test("each message is there once, and a result knows the call of an earlier turn", () => {
  const call = { id: "1", function: { name: "run", arguments: "{}" } };
  const added = new Map([
    ["a", { messages: [say("user", "go")], output: say("assistant", "", { tool_calls: [call] }) }],
    ["b", { messages: [say("tool", "done", { tool_call_id: "1" })], output: say("assistant", "end") }],
  ]);
  const turns = turnsOf(pathThrough([node("a", null), node("b", "a"), node("c", "b", { status: "running" })]), added);
  assert.deepEqual(turns.map(({ places, answer }) => [places.length, answer?.message.content]), [[1, ""], [1, "end"], [0, undefined]]);
  assert.deepEqual(turns[1].places[0].call, { name: "run", index: 1 });
  assert.deepEqual(messagesOf(turns).map(({ turn, place }) => [turn, place.index]), [["a", 0], ["a", 1], ["b", 2], ["b", 3]]);
});

test("two conversations part at the first message that says something else, whatever the ids of calls", () => {
  const called = (id, name) => say("assistant", "", { tool_calls: [{ id, function: { name, arguments: "{}" } }] });
  assert.equal(sameBeginning([say("user", "a"), called("1", "run")], [say("user", "a"), called("2", "run"), say("tool", "x")]), 2);
  const [one, other] = [[say("user", "a"), called("1", "run"), say("tool", "y")], [say("user", "a"), called("1", "stop")]]
    .map((messages) => messages.map((message) => ({ message })));
  const { same, rows } = parted(one, other);
  assert.equal(same, 1);
  assert.deepEqual(rows.map((row) => [row.equal, row.other === undefined]), [[false, false], [false, true]]);
});

test("figures that differ are marked, and a key of one session only is a figure of both", () => {
  const side = (score, metadata) => ({ tree: { score, status: "ended", failed: 0, metrics: {}, metadata, discount: 1, created_at: 1, ended_at: 3 }, nodes: [node("a", null)] });
  const rows = figures(side(1, { step: 1 }), side(0, {}));
  assert.deepEqual(rows.filter(({ differs }) => differs).map(({ name, values }) => [name, values]), [["score", [1, 0]], ["metadata step", [1, null]]]);
});

test("who goes back in a side branch stays in it, and another turn is read in its own conversation", () => {
  const nodes = [node("a", null), node("b", "a"), node("side", "a"), node("c", "b"), node("d", "c")];
  assert.deepEqual(ids(pathOf(nodes, "side", "a")), ["a", "side"]);
  assert.deepEqual(ids(pathOf(nodes, undefined, "a")), ["a", "b", "c", "d"]);
  assert.deepEqual(ids(pathOf(nodes, "side", "c")), ["a", "b", "c", "d"]);
  assert.deepEqual(ids(pathOf(nodes, "gone", "side")), ["a", "side"]);
});

test("the address names a message by its index, and a turn alone by its first message", () => {
  const added = new Map([
    ["a", { messages: [say("system", "s"), say("user", "u")], output: say("assistant", "x") }],
    ["b", { messages: [say("user", "v")], output: say("assistant", "y") }],
    ["f", { messages: [say("user", "w")], output: say("assistant", "") }],
  ]);
  const stops = stopsOf(turnsOf(pathThrough([node("a", null), node("b", "a"), node("f", "b", { status: "failed" })]), added));
  assert.deepEqual(stops.map(({ turn, index }) => [turn, index]), [[0, 0], [0, 1], [0, 2], [1, 3], [1, 4], [2, 5]]); // no answer of f
  assert.deepEqual([stopAt(stops, 1, "4"), stopAt(stops, 1, undefined), stopAt(stops, 1, "0"), stopAt(stops, -1, "4")], [4, 3, 3, -1]);
});

test("a path of a thousand turns is drawn around the turn that is read, and grows at its ends", () => {
  assert.deepEqual(drawnAround(null, 0, 50, 1000), { from: 0, to: 50 });
  assert.deepEqual(drawnAround(null, 900, 50, 1000), { from: 850, to: 950 });
  assert.deepEqual(drawnAround({ from: 0, to: 50 }, 20, 50, 1000), { from: 0, to: 50 });
  assert.deepEqual(drawnAround({ from: 0, to: 50 }, 49, 50, 1000), { from: 0, to: 99 });
  assert.deepEqual(drawnAround({ from: 850, to: 950 }, 850, 50, 1000), { from: 800, to: 950 });
  assert.deepEqual(drawnAround({ from: 0, to: 50 }, 900, 50, 1000), { from: 850, to: 950 });
  assert.deepEqual(drawnAround({ from: 850, to: 950 }, 3, 50, 10), { from: 0, to: 10 });
});

test("a key is no command while somebody types, or holds another key", () => {
  const target = (field) => ({ closest: () => (field ? {} : null) });
  assert.ok(isCommand({ target: target(false) }));
  assert.ok(!isCommand({ target: target(true) }));
  for (const held of ["ctrlKey", "metaKey", "altKey", "isComposing", "defaultPrevented"]) assert.ok(!isCommand({ target: target(false), [held]: true }), held);
});

test("a reward of the session goes to the last complete main turn of a trained route", () => {
  const main = { purpose: "main" };
  const nodes = [node("a", null, main), node("b", "a", main), node("frozen", "b", { ...main, route_kind: "frozen" }), node("title", null, { purpose: "title" }), node("f", "b", { ...main, status: "failed" })];
  assert.equal(lastMain(nodes).interaction_id, "b");
  assert.equal(lastMain([node("title", null, { purpose: "title" })]), undefined);
});

test("a reward replaces the one of its name only", () => {
  const rewarded = node("a", null, { reward: 0, rewards: { anna: 1 } });
  assert.deepEqual([replaced(rewarded, ""), replaced(rewarded, "anna"), replaced(rewarded, "constructor"), replaced(node("b", null), "")], [0, 1, null, null]);
  assert.deepEqual(rewardBody(rewarded, 0.5, ""), { reward: 0.5, interaction_id: "a" });
  assert.deepEqual(rewardBody(rewarded, 0.5, "anna"), { reward: 0.5, interaction_id: "a", name: "anna" });
});

test("after two conversations parted, turn stands beside turn, however many messages each has", () => {
  const entry = (turn, content, role = "user") => ({ turn, message: say(role, content) });
  const one = [entry("a", "go"), entry("a", "x", "assistant"), entry("b", "r1", "tool"), entry("b", "r2", "tool"), entry("b", "y", "assistant"), entry("c", "on"), entry("c", "z", "assistant")];
  const other = [entry("a", "go"), entry("a", "w", "assistant"), entry("b", "r1", "tool"), entry("b", "v", "assistant"), entry("c", "on"), entry("c", "z", "assistant")];
  const { same, rows } = parted(one, other);
  assert.equal(same, 1);
  assert.deepEqual(rows.map((row) => [row.one?.message.content, row.other?.message.content, row.equal]), [
    ["x", "w", false], ["r1", "r1", true], ["r2", "v", false], ["y", undefined, false], ["on", "on", true], ["z", "z", true],
  ]);
});

test("the best and the worst of a group are named, unless all are equal", () => {
  const of = (scores) => sorted(scores.map((score) => ({ summary: { score } })), "score");
  assert.deepEqual(of([0, null, 1, 0.5]).map(({ summary }) => summary.score), [1, 0.5, 0, null]);
  assert.deepEqual(ranks(of([0, null, 1, 0.5])), ["best", "", "worst", ""]);
  assert.deepEqual(ranks(of([1, 1, null])), ["", "", ""]);
  assert.deepEqual(ranks(of([null])), [""]);
});
