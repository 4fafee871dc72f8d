// The address of the list becomes the filter of the API.
import assert from "node:assert/strict";
import { test } from "node:test";
import { filterCount, filterOf, orderOf, totalOf, withoutFilters } from "../../../proxy/page/static/views/sessions/filters.js";
import { aligned, counted, versionsText } from "../../../proxy/page/static/views/sessions/words.js";

test("each part of the address is a filter, and empty ones are none", () => {
  const query = {
    search: "x y", status: "ended", group: "g", task: "t", purpose: "title", forked: "yes", reward_min: "0.5", reward_max: "1",
    version_min: "", version_max: "3", text: '"a b" c', order: "oldest", other: "1",
  };
  assert.deepEqual(filterOf(query), {
    search: "x y", status: "ended", group_id: "g", task_id: "t", purpose: "title", forked: true,
    reward: { min: 0.5, max: 1 }, version: { max: 3 }, text: '"a b" c',
  });
  assert.deepEqual(filterOf({}), {});
  assert.deepEqual(filterOf({ forked: "no", reward_min: " ", search: "" }), { forked: false });
  assert.equal(filterCount(query), 9);
  assert.deepEqual(withoutFilters(query), { order: "oldest", other: "1" });
  assert.deepEqual([orderOf(query), orderOf({})], ["oldest", "newest"]);
});

test("what cannot be read goes to the server as it is, which says what is wrong", () => {
  assert.deepEqual(filterOf({ reward_min: "high", forked: "maybe" }), { reward: { min: "high" }, forked: "maybe" });
});

test("the total is that of the chosen status, and unknown if the server cannot count", () => {
  const counts = { active: 2, ended: 3, expired: 0 };
  assert.deepEqual([totalOf(counts, ""), totalOf(counts, "ended"), totalOf(counts, "odd"), totalOf(null, "")], [5, 3, null, null]);
});

test("counts and versions in words", () => {
  assert.equal(counted({ first: 1, system_changed: 2, new_root: 0 }), "2 system changed, 1 first");
  assert.equal(versionsText({ version: 3, summary: { versions: [4, 6] } }), "4–6");
  assert.equal(versionsText({ version: 3, summary: { versions: [4, 4] } }), "4");
  assert.equal(versionsText({ version: 3, summary: { versions: null } }), "3");
  assert.equal(versionsText({ version: null, summary: { versions: null } }), "–");
});

test("rewards have as many decimals in each row", () => {
  assert.deepEqual([0.5, 1, -0.256, 1e30, null].map((value) => aligned(value)), ["0.50", "1.00", "\u22120.26", "1.0e+30", "–"]);
});
