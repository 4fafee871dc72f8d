// The pure logic of the view of training runs: sums of pages, runs beside each other, and CSV.
import assert from "node:assert/strict";
import { test } from "node:test";
import { csv } from "../../../proxy/page/static/views/overview/series.js";
import { added, besideEachOther, chosenRuns, runsOf } from "../../../proxy/page/static/views/runs/runs_model.js";

const ENTRY = {
  run: "a", step: 1, sessions: 2, ended: 2, turns: 4, forks: 1, failed: 0, output_tokens: 10, rewarded: 1, score_sum: 0.5, score_squares: 0.25,
  compared: 0, kl_sum: 0, largest_ratio: null, worst: [{ session_id: "s1", score: 0.5 }],
};

test("pages add up, and the lowest scores are kept", () => {
  const other = { ...ENTRY, rewarded: 2, score_sum: 0.3, compared: 4, kl_sum: 2, largest_ratio: 3, worst: [{ session_id: "s2", score: 0.1 }, { session_id: "s0", score: 0.5 }] };
  const first = added(new Map(), [ENTRY, { ...ENTRY, run: null, step: 0 }]);
  const sums = added(first, [other]);
  const [one] = [...sums.values()];
  assert.deepEqual([one.sessions, one.rewarded, one.score_sum, one.kl_sum, one.largest_ratio], [4, 3, 0.8, 2, 3]);
  assert.deepEqual(one.worst.map(({ session_id }) => session_id), ["s2", "s0", "s1"]);
  assert.equal(first.get('["a",1]').sessions, 2, "the sums before stay as they were");
  const many = Array.from({ length: 8 }, (_, at) => ({ session_id: `w${at}`, score: at }));
  assert.equal([...added(added(new Map(), [{ ...ENTRY, worst: many }]), [{ ...ENTRY, worst: many }]).values()][0].worst.length, 10);
});

test("runs are those with a number as step, the largest first", () => {
  const sums = added(new Map(), [ENTRY, { ...ENTRY, run: null }, { ...ENTRY, run: "b", step: 2, sessions: 9 }, { ...ENTRY, run: "c", step: "x" }]);
  assert.deepEqual(runsOf(sums).map(({ run }) => run), ["b", "a", "unnamed"]);
  assert.deepEqual(chosenRuns(runsOf(sums), undefined), ["b", "a"]);
  assert.deepEqual(chosenRuns(runsOf(sums), "a,nobody"), ["a"]);
  assert.deepEqual(chosenRuns([{ run: "x,y" }, { run: "z" }], "x%2Cy"), ["x,y"]);
});

test("a run without a step has a gap there", () => {
  const sums = added(new Map(), [ENTRY, { ...ENTRY, step: 3, rewarded: 0 }, { ...ENTRY, run: "b", step: 2 }]);
  assert.deepEqual(besideEachOther(sums, ["a", "b"], "mean_score"), [[1, 2, 3], [0.5, null, null], [null, 0.5, null]]);
  assert.deepEqual(besideEachOther(sums, ["a"], "forks"), [[1, 3], [0.5, 0.5]]);
  assert.deepEqual(besideEachOther(sums, ["a"], "kl"), [[1, 3], [null, null]]);
});

test("CSV quotes what needs it, and no text becomes a formula", () => {
  assert.equal(csv("step", ["a, b", '=1+1', 'say "x"'], [[1, 2], [0.5, null], [-1, 2], [3, 4]]),
    'step,"a, b",\'=1+1,"say ""x"""\r\n1,0.5,-1,3\r\n2,,2,4\r\n');
});
