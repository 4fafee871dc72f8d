// Distributions of a group's numbers: every value is in one bin, and bins have round edges.
import assert from "node:assert/strict";
import { test } from "node:test";
import { bins, partsOf, rangeOf, share, spread, thinned } from "../../../proxy/page/static/views/groups/distribution.js";
import { sorted } from "../../../proxy/page/static/views/groups/sorting.js";

const total = (found) => found.reduce((sum, { count }) => sum + count, 0);

test("the spread of numbers divides by n - 1, as advantages do", () => {
  assert.deepEqual(spread([1, 0, 0.5]), { count: 3, mean: 0.5, std: 0.5, min: 0, max: 1 });
  assert.equal(spread([2]).std, null);
  assert.equal(spread([]), null);
});

test("zeros and ones stand at both ends, in round bins", () => {
  const found = bins([0, 0, 1, 1, 1]);
  assert.deepEqual([found[0], found.at(-1)], [{ from: 0, to: 0.1, count: 2 }, { from: 0.9, to: 1, count: 3 }]);
  assert.equal(total(found), 5);
});

test("every value is in one bin, wherever they are", () => {
  for (const [low, high] of [[-1, 1], [0.1, 0.7], [-1e30, 1e30], [1e-9, 3e-9], [99.99, 100], [-3, -1]]) {
    const values = Array.from({ length: 101 }, (_, index) => low + ((high - low) * index) / 100);
    const found = bins(values);
    assert.equal(total(found), 101);
    assert.ok(found[0].from <= low + 1e-12 * Math.abs(low) && found.at(-1).to >= high - 1e-12 * Math.abs(high), `${low} ${high}`);
    assert.ok(found.length >= 5 && found.length <= 26, String(found.length));
  }
});

test("equal values are one bin, and no values none", () => {
  assert.deepEqual(bins([2, 2]), [{ from: 2, to: 2, count: 2 }]);
  assert.deepEqual(bins([]), []);
  assert.deepEqual(partsOf([2, 2], [2, 2], 9), [2]);
});

test("a small histogram counts in parts of the range of all rows", () => {
  assert.deepEqual(partsOf([0, 0.49, 0.5, 1], [0, 1], 2), [2, 2]);
  assert.deepEqual(rangeOf([3, -1, 2]), [-1, 3]);
  assert.deepEqual([share(0, [-1, 3]), share(5, [5, 5])], [0.25, 0.5]);
});

test("a long line keeps its ends", () => {
  const seen = thinned(Array.from({ length: 1000 }, (_, index) => index), 10);
  assert.deepEqual([seen.length, seen[0], seen.at(-1)], [10, 0, 999]);
  assert.deepEqual(thinned([1, 2], 10), [1, 2]);
});

test("sessions are ordered by score, those without one last, and the given rows stay as they are", () => {
  const rows = [["a", null, 9], ["b", -1, 2], ["c", 3, 5], ["d", null, 1]].map(([id, score, turns]) => ({ id, summary: { score, turns } }));
  const order = (by) => sorted(rows, by).map(({ id }) => id).join("");
  assert.deepEqual([order("score"), order("turns"), order("start"), order("toString")], ["cbad", "acbd", "abcd", "abcd"]);
  assert.equal(rows[0].id, "a");
});

test("a value on an edge is in the bin above it, also where a division is not exact", () => {
  const found = bins([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]);
  assert.deepEqual(found.map(({ count }) => count), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
});
