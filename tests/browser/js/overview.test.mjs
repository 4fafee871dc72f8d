// Numbers over time, as the overview joins and says them.
import assert from "node:assert/strict";
import { test } from "node:test";
import { apart, bars, inWords, joined, lately, rows, summary, withAsked } from "../../../proxy/page/static/views/overview/series.js";

const history = (...at) => ({ every_s: 5, at, turns_per_s: at.map((each) => each / 10), waiting: at.map(() => 0) });

test("newer samples replace older ones of the same time, and what came before stays", () => {
  const newer = { ...history(15, 20), turns_per_s: [7, 8] };
  assert.deepEqual(joined(history(5, 10, 15), newer).turns_per_s, [0.5, 1, 7, 8]);
  assert.deepEqual(joined(history(5, 10), newer).at, [5, 10, 15, 20]);
  assert.deepEqual(joined(null, newer), newer);
  assert.deepEqual(joined(history(5), history()), history(5));
});

test("an answer that was long on its way takes nothing back that came since", () => {
  const asked = { at: 16, history: history(5, 10, 15) };
  const now = { at: 21, history: history(15, 20) };
  assert.deepEqual(withAsked({ now, history: now.history }, asked), { now, history: history(5, 10, 15, 20) });
  assert.deepEqual(withAsked({ now: null, history: null }, asked), { now: asked, history: asked.history });
  assert.equal(withAsked({ now: { at: 3 }, history: history() }, asked).now, asked);
});

test("at most an hour is kept", () => {
  const long = history(...Array.from({ length: 720 }, (_, index) => 5 * index));
  const both = joined(long, history(3600, 3605));
  assert.equal(both.at.length, 720);
  assert.equal(both.at.at(-1), 3605);
  assert.equal(both.turns_per_s.length, 720);
});

test("only the span is shown, with a gap where the server did not run", () => {
  assert.deepEqual(lately(history(5, 10, 15), ["turns_per_s"], 10, 15), [[10, 15], [1, 1.5]]);
  assert.deepEqual(lately(history(5, 10, 100), ["turns_per_s", "waiting"], 1000, 100), [
    [5, 10, 15, 100],
    [0.5, 1, null, 10],
    [0, 0, null, 0],
  ]);
  assert.deepEqual(lately(history(), ["waiting"], 10, 0), [[], []]);
});

test("a chart is said in words, and missing values are no zeros", () => {
  assert.deepEqual(summary([1, null, 3, null]), { last: 3, most: 3, mean: 2 });
  assert.deepEqual(summary([null]), { last: null, most: null, mean: null });
  const words = inWords([{ label: "p50", values: [1, 2] }, { label: "p95", values: [null] }], (value) => `${value} s`);
  assert.equal(words, "p50: now 2 s, highest 2 s, mean 1.5 s; p95: no values");
});

test("a table has the newest first, and at most the rows that are wanted", () => {
  assert.deepEqual(rows([[1, 2, 3], [10, 20, 30]]), [[3, 30], [2, 20], [1, 10]]);
  assert.deepEqual(rows([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 3).map(([at]) => at), [5, 3, 1]);
});

test("bars are sorted by count and measured by the largest", () => {
  assert.deepEqual(bars({ first: 9, branched: 1, template: 4, drift: 0, tools_changed: 4 }, ["first"]), [
    { name: "template", count: 4, share: 1 },
    { name: "tools_changed", count: 4, share: 1 },
    { name: "branched", count: 1, share: 0.25 },
  ]);
  assert.deepEqual(bars({}), []);
});

test("one sample that is missing is a gap, and a value that is not known is none", () => {
  assert.deepEqual(lately(history(5, 10, 20), ["turns_per_s"], 1000, 20)[0], [5, 10, 15, 20]);
  const known = { ...history(5, 10), first_token_p50_s: [0.5, null] };
  assert.deepEqual(lately(known, ["first_token_p50_s"], 1000, 10), [[5, 10], [0.5, null]]);
});

test("bars of one length are in the order of their names", () => {
  assert.deepEqual(bars({ z: 2, a: 2, m: 2 }).map(({ name }) => name), ["a", "m", "z"]);
});

test("a single moment stands in the middle of a minute, a single version between its neighbours", () => {
  assert.deepEqual(apart(30)({ data: [[1000], [0.5]] }, 1000, 87_400), [970, 1030]);
  assert.deepEqual(apart(1)({ data: [[0], [0.5]] }, 0, 100), [-1, 1]);
  assert.deepEqual(apart(1)({ data: [[3, 9], [0.5, 1]] }, 3, 9), [3, 9]);
});
