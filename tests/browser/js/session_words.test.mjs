// What the page says of a session and of its nodes in words and numbers.
import assert from "node:assert/strict";
import { test } from "node:test";

const at = "../../../proxy/page/static/views/session/";
const { factsOf, nodeNamed } = await import(`${at}session_facts.js`);
const { excerpt, isFork, isLost, isUnaligned, meaningOf, wordOf } = await import(`${at}tree/tree_words.js`);

const node = (more) => ({
  interaction_id: "i", parent_id: null, status: "complete", reason: "first", turn: 0, prompt_tokens: 10, output_tokens: 2, versions: [[2, 0]],
  purpose: "main", agent: null, reward: null, return: 0, aligned: false, model: "m", ...more,
});

test("a node is called by its reason, or by its status if it is not complete", () => {
  assert.equal(wordOf(node({ reason: "system_changed" })), "system changed");
  assert.equal(wordOf(node({ status: "superseded" })), "superseded");
  assert.equal(wordOf(node({ status: "begun" })), "cut off");
  assert.equal(wordOf(node({ reason: "of_a_newer_server" })), "of a newer server");
});

test("its meaning is that of the API, and empty until it is known", () => {
  const meanings = { reason: { first: "The first." }, status: { failed: "it failed" } };
  assert.equal(meaningOf(node({}), meanings), "The first.");
  assert.equal(meaningOf(node({ status: "failed" }), meanings), "it failed");
  assert.equal(meaningOf(node({}), {}), "");
});

test("a fork is a complete turn that neither begins nor goes on, a lost one is not complete", () => {
  assert.deepEqual(["first", "continued", "rewritten", "new_root"].map((reason) => isFork(node({ reason }))), [false, false, true, false]);
  assert.equal(isFork(node({ reason: "rewritten", status: "failed" })), false);
  assert.deepEqual(["complete", "running", "failed", "aborted", "superseded", "begun"].map((status) => isLost(node({ status }))), [false, false, true, true, true, true]);
});

test("only a complete turn with a parent can be unaligned", () => {
  assert.deepEqual([node({ parent_id: "p" }), node({ parent_id: "p", aligned: true }), node({}), node({ parent_id: "p", status: "failed" })].map(isUnaligned), [true, false, false, false]);
});

test("a row shows the answer, the calls, the error, or the progress", () => {
  assert.equal(excerpt(node({ answer: { text: "hello", calls: ["add"] } })), "hello  add()");
  assert.equal(excerpt(node({ status: "failed", error: "the engine died" })), "the engine died");
  assert.equal(excerpt({ status: "running", here: true, output_tokens: 5 }), "5 tokens so far");
  assert.match(excerpt({ status: "running", here: false }), /another worker/);
  assert.equal(excerpt(node({})), "");
});

test("facts count what is in the tree", () => {
  const nodes = [node({}), node({ reason: "rewritten", versions: [[1, 3], [1, 5]], prompt_tokens: 90 }), node({ status: "failed" }), { status: "running" }];
  const facts = factsOf(nodes);
  assert.deepEqual([facts.turns, facts.running, facts.lost, facts.forks, facts.sampled, facts.longest, facts.versions], [2, 1, { failed: 1 }, 1, 4, 92, [0, 5]]);
  assert.equal(factsOf([]).versions, null);
});

test("a turn is named by its id or its number", () => {
  const nodes = [node({ interaction_id: "a", turn: 0 }), node({ interaction_id: "b", turn: null }), node({ interaction_id: "c", turn: 1 })];
  assert.equal(nodeNamed(nodes, "1").interaction_id, "c");
  assert.equal(nodeNamed(nodes, "b").interaction_id, "b");
  assert.deepEqual([nodeNamed(nodes, "null"), nodeNamed(nodes, ""), nodeNamed(nodes, "9")], [undefined, undefined, undefined]);
});
