// Orders of the list: as the server sorts, so that news come in where they belong.
import assert from "node:assert/strict";
import { test } from "node:test";
import { choices, clicked, comparing, isByValue, orderFrom, valueOf } from "../../../proxy/page/static/views/sessions/order.js";
import { changed } from "../../../proxy/page/static/views/sessions/rows.js";
import { columnKeys, keysOf } from "../../../proxy/page/static/views/sessions/value_keys.js";

const summary = { score: null, turns: 1, forks: 0, failed: 0, aborted: 0, prompt_tokens: 5, output_tokens: 2, last_at: 9 };
const entry = (id, at, more = {}, metadata = {}) =>
  ({ session_id: id, created_at: at, ended_at: null, metadata, metrics: {}, summary: { ...summary, ...more } });
const sorted = (rows, order) => [...rows].sort(comparing(order)).map((row) => row.session_id).join("");

test("rows are sorted by a value with missing ones last, and equal ones in order of creation", () => {
  const rows = [entry("a", 1, { score: 0.5 }), entry("b", 2, { score: -1 }), entry("c", 3, { score: 0.5 }), entry("d", 4), entry("e", 5)];
  assert.deepEqual([sorted(rows, "reward"), sorted(rows, "-reward")], ["bacde", "acbde"]);
  assert.deepEqual([sorted(rows, "newest"), sorted(rows, "oldest")], ["edcba", "abcde"]);
  assert.deepEqual([sorted(rows, "duration"), sorted(rows, "-duration")], ["edcba", "abcde"]);
});

test("numbers come before texts and these before booleans; lists and objects are no values", () => {
  const steps = { a: 1, b: 10, c: 2.5, d: "late", e: { is: "odd" }, f: true };
  const rows = Object.entries(steps).map(([id, step], at) => entry(id, at, {}, { step }));
  assert.deepEqual([sorted(rows, "metadata.step"), sorted(rows, "-metadata.step")], ["acbdfe", "fdbcae"]);
  assert.equal(valueOf(entry("a", 1), "metadata.constructor"), undefined);
  assert.equal(valueOf(entry("a", 1), "nothing"), undefined);
  assert.equal(sorted([entry("b", 1, {}, { of: `${"x".repeat(200)}a` }), entry("a", 2, {}, { of: "x".repeat(200) })], "metadata.of"), "ba");
});

test("a click sorts by the greatest, and the next one the other way round", () => {
  assert.deepEqual(["newest", "-reward", "reward"].map((order) => clicked(order, "reward")), ["-reward", "reward", "-reward"]);
  assert.deepEqual(["newest", "oldest", "reward"].map((order) => clicked(order, "created")), ["oldest", "newest", "newest"]);
  assert.deepEqual(orderFrom("-metadata.a-b"), { name: "metadata.a-b", descending: true });
  assert.deepEqual(["newest", "oldest", "turns"].map(isByValue), [false, false, true]);
  assert.deepEqual(choices(["metrics.won"]).slice(-2).map(([order]) => order), ["metrics.won", "-metrics.won"]);
});

test("a session whose value changed moves, comes in, or leaves for the rows that are not loaded", () => {
  const rows = [entry("a", 1, { score: 1 }), entry("b", 2, { score: 2 }), entry("c", 3, { score: 3 })];
  const ids = (found, whole) => changed(rows, found.map((row) => row.session_id), found, { order: "reward", whole }).map((row) => row.session_id).join("");
  assert.equal(ids([entry("a", 1, { score: 2.5 })], false), "bac");
  assert.equal(ids([entry("a", 1, { score: 9 })], false), "bc");
  assert.equal(ids([entry("a", 1, { score: 9 })], true), "bca");
  assert.equal(ids([entry("c", 3, { score: 3 })], false), "abc"); // the last row itself stays
  assert.equal(ids([entry("d", 4, { score: 0 })], false), "dabc");
});

test("the keys of metadata and metrics that have values can be sorted by; the step and the order's have a column", () => {
  const rows = [entry("a", 1, {}, { step: 1, list: [1] }), { ...entry("b", 2, {}, { env: "x" }), metrics: { won: true } }];
  assert.deepEqual(keysOf(rows, "-metadata.other"), ["metadata.env", "metadata.other", "metadata.step", "metrics.won"]);
  assert.deepEqual(columnKeys(keysOf(rows, "metrics.won"), "metrics.won"), ["metadata.step", "metrics.won"]);
  assert.deepEqual(keysOf([], "newest"), []);
});
