// Conditions on metadata as people write them, and filters that a browser keeps.
import assert from "node:assert/strict";
import { test } from "node:test";
import { conditionsOf, conditionText } from "../../../proxy/page/static/views/sessions/conditions.js";
import { filterOf, firstOf, withoutFilters } from "../../../proxy/page/static/views/sessions/filters.js";
import { forgetFilter, savedFilters, saveFilter } from "../../../proxy/page/static/views/sessions/saved_filters.js";
import { sessionsOf, stepsOf } from "../../../proxy/page/static/views/runs/runs_model.js";

test("values, lists and ranges are read", () => {
  assert.deepEqual(conditionsOf("step=12, env = sokoban"), { step: 12, env: "sokoban" });
  assert.deepEqual(conditionsOf("step>=3,step<=5"), { step: { min: 3, max: 5 } });
  assert.deepEqual(conditionsOf("env=a, env=b, won=true, none=null"), { env: ["a", "b"], won: true, none: null });
  assert.deepEqual(conditionsOf('name="a, \\"b", x=y=z'), { name: 'a, "b', x: "y=z" });
  assert.deepEqual(conditionsOf("empty=, __proto__=1"), Object.fromEntries([["empty", ""], ["__proto__", 1]]));
  assert.deepEqual(conditionsOf(" , "), {});
});

test("what is no condition is none, and the server says so", () => {
  for (const text of ["step", "=3", "step>=three", "step=1, step>=2", "a=1, b"]) assert.equal(conditionsOf(text), null, text);
  assert.deepEqual(filterOf({ metadata: "step" }), { metadata: "step" });
  assert.deepEqual(filterOf({ metadata: " " }), {});
});

test("a condition that was written is read again", () => {
  for (const value of [12, -0.5, "plain", "a, b", "12", "true", "", ' "x" ', null, true]) {
    assert.deepEqual(conditionsOf(conditionText("key", value)), { key: value }, conditionText("key", value));
  }
});

test("the further filters of an address are those of the API", () => {
  const query = { turns_min: "2", tokens_max: "1000", lasted_min: "0.5", trained: "grpo/2", validation: "skip", withdrawn: "no", forked: "2", order: "reward" };
  assert.deepEqual(filterOf(query), {
    turns: { min: 2 }, tokens: { max: 1000 }, duration: { min: 0.5 }, trained_in: "grpo/2", validation: "skip", withdrawn: false, forks: { min: 2 },
  });
  assert.deepEqual(withoutFilters(query), { order: "reward" });
  assert.deepEqual(["10", "0", "-1", "x", undefined, "99999"].map((first) => firstOf({ first })), [10, null, null, null, null, null]);
});

test("a step of a run leads to its sessions", () => {
  const sums = new Map([["a", { run: "r, 1", step: 2, worst: [{}] }], ["b", { run: "r, 1", step: 3, worst: [{}] }], ["c", { run: "r, 1", step: 4, worst: [] }]]);
  assert.deepEqual(stepsOf(sums, "r, 1").map(({ step }) => step), [3, 2]);
  const query = sessionsOf(sums.get("a"), { run: "project" });
  assert.deepEqual(filterOf(query), { metadata: { project: "r, 1", step: 2 }, validation: "skip", withdrawn: false });
  assert.deepEqual(filterOf(sessionsOf({ run: null, step: 1 }, {})).metadata, { experiment: null, step: 1 });
});

test("a browser keeps filters by name, and what it cannot read or keep does no harm", () => {
  const items = new Map();
  const storage = { getItem: (key) => items.get(key) ?? null, setItem: (key, value) => items.set(key, value), removeItem: (key) => items.delete(key) };
  assert.deepEqual(savedFilters(storage), []);
  assert.equal(saveFilter("b", { order: "reward" }, storage), true);
  saveFilter("a", { group: "g" }, storage);
  saveFilter("b", { order: "-reward" }, storage);
  assert.deepEqual(savedFilters(storage), [{ name: "a", query: { group: "g" } }, { name: "b", query: { order: "-reward" } }]);
  forgetFilter("a", storage);
  forgetFilter("b", storage);
  assert.equal(items.size, 0);
  for (const text of ["{", "3", '[{"name": 1, "query": {}}]', '[{"name": "x", "query": {"a": 1}}, null]']) {
    items.set("tokengrove-filters", text);
    assert.deepEqual(savedFilters(storage), [], text);
  }
  const blocked = { getItem: () => null, setItem: () => { throw new Error("full"); } };
  assert.equal(saveFilter("a", {}, blocked), false);
});
