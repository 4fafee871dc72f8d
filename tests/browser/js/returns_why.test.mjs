// Returns and scores that differ on one screen say why.
import assert from "node:assert/strict";
import { test } from "node:test";
import { whyReturnsDiffer } from "../../../proxy/page/static/lib/returns_why.js";

const session = { score: 1, returns: { first: 1, min: 1, max: 1 }, turns: 3, forks: 0, discount: 1, credit: "tree", reward_scope: null, episode_score: null };

test("equal values, or none, need no reason", () => {
  assert.equal(whyReturnsDiffer(session), null);
  assert.equal(whyReturnsDiffer({ ...session, score: null }), null);
  assert.equal(whyReturnsDiffer({ ...session, returns: { first: null, min: null, max: null } }), null);
  assert.equal(whyReturnsDiffer({ ...session, score: 0.3, returns: { first: 0.1 + 0.2, min: 0.1 + 0.2, max: 0.1 + 0.2 } }), null);
});

test("a discount is told with the sum of the first turn", () => {
  const why = whyReturnsDiffer({ ...session, discount: 0.9, returns: { first: 0.81, min: 0.81, max: 1 } });
  assert.match(why, /times the discount 0\.9 for each turn in between\. First turn: 0\.9 \*\* 2 × 1 = 0\.81\.$/);
});

test("a sum that is not right is not told", () => {
  const why = whyReturnsDiffer({ ...session, discount: 0.9, forks: 1, returns: { first: 0.5, min: 0, max: 1 } });
  assert.match(why, /as the mean over branches, times the discount 0\.9/);
  assert.doesNotMatch(why, /First turn/);
});

test("rewards of turns, scores of the end, paths and the order of completion are told", () => {
  const differ = { ...session, returns: { first: 1, min: 0, max: 1 } };
  assert.equal(whyReturnsDiffer(differ), "The score is the sum of all rewards. The return of a turn is its own reward and that of what follows it.");
  assert.match(whyReturnsDiffer({ ...differ, episode_score: -0.5 }), /^The score −0\.5 was set at the end/);
  assert.match(whyReturnsDiffer({ ...differ, reward_scope: "path" }), /mean over the paths/);
  assert.match(whyReturnsDiffer({ ...differ, credit: "linear", forks: 2 }), /and that of what completed later\.$/);
});
