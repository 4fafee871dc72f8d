// The list of sessions as pages and news change it: nothing stands twice, nothing that was seen is lost.
import assert from "node:assert/strict";
import { test } from "node:test";
import { appended, changed, gathered, portion, renewed } from "../../../proxy/page/static/views/sessions/rows.js";

const entry = (id, at, state = "old") => ({ session_id: id, created_at: at, state });
const ids = (rows) => rows.map((row) => row.session_id).join("");
const newest = { order: "newest", whole: false };

test("a page comes after the rows, and an entry that is there already is replaced", () => {
  const rows = appended([entry("c", 3), entry("b", 2)], [entry("b", 2, "new"), entry("a", 1)]);
  assert.equal(ids(rows), "cba");
  assert.equal(rows[1].state, "new");
});

test("a beginning that was read again keeps what follows it", () => {
  const rows = ["d", "c", "b", "a"].map((id) => entry(id, 1));
  const page = [entry("e", 1, "new"), entry("d", 1, "new"), entry("c", 1, "new")];
  const now = renewed(rows, page, { whole: false });
  assert.deepEqual([ids(now.rows), now.rest, now.rows[2].state], ["edcba", true, "new"]);
  assert.deepEqual(ids(renewed(rows, [entry("d", 1), entry("b", 1)], { whole: false }).rows), "dba"); // c was deleted
});

test("a page that is the whole list, or has nothing in common with it, replaces it", () => {
  const rows = [entry("b", 2), entry("a", 1)];
  assert.deepEqual(renewed(rows, [entry("a", 1)], { whole: true }), { rows: [entry("a", 1)], rest: false });
  assert.deepEqual(renewed(rows, [entry("z", 9)], { whole: false }), { rows: [entry("z", 9)], rest: false });
});

test("changed sessions are replaced, new ones come in at their place, and those that match no more leave", () => {
  const rows = [entry("d", 4), entry("c", 3), entry("b", 2)];
  const now = changed(rows, ["e", "d", "c"], [entry("e", 5, "new"), entry("c", 3, "new")], newest);
  assert.deepEqual([ids(now), now[1].state], ["ecb", "new"]);
});

test("a session beyond the last row comes in only if the list is whole", () => {
  const rows = [entry("c", 3), entry("b", 2)];
  assert.equal(ids(changed(rows, ["a"], [entry("a", 1)], newest)), "cb");
  assert.equal(ids(changed(rows, ["a"], [entry("a", 1)], { ...newest, whole: true })), "cba");
  assert.equal(ids(changed([entry("b", 2)], ["c"], [entry("c", 3)], { order: "oldest", whole: true })), "bc");
  assert.equal(ids(changed([], ["a"], [entry("a", 1)], newest)), "a");
});

test("only so many ids are asked for at once as an address holds, but at least one", () => {
  assert.deepEqual(portion(["a", "b", "c"], 2), [["a", "b"], ["c"]]);
  const long = "x".repeat(5000);
  assert.deepEqual(portion([long, "a"]), [[long], ["a"]]);
  assert.deepEqual(portion(["a", long]), [["a"], [long]]);
  assert.deepEqual(portion([]), [[], []]);
});

test("short and empty pages are followed until there are enough entries, or no more", async () => {
  const pages = { start: [[], "1"], 1: [["a"], "2"], 2: [["b", "c"], "3"], 3: [["d"], null] };
  const asked = [];
  const read = async (limit, cursor) => {
    asked.push(limit);
    const [rows, next] = pages[cursor ?? "start"];
    return { rows, cursor: next, page: cursor };
  };
  assert.deepEqual(await gathered(3, read), { rows: ["a", "b", "c"], cursor: "3", first: { rows: [], cursor: "1", page: null } });
  assert.deepEqual(asked, [3, 3, 2]);
  assert.deepEqual((await gathered(9, read)).cursor, null);
});
