// Which rows of a long list are drawn, and where the keys lead.
import assert from "node:assert/strict";
import { test } from "node:test";
import { nextRow, scrolledTo, visible } from "../../../proxy/page/static/lib/window.js";

const place = { top: 0, height: 280, row: 28, count: 10_000 };

test("the rows that are seen are drawn, and some more on either side", () => {
  assert.deepEqual(visible({ ...place, spare: 0 }), { from: 0, to: 11 });
  assert.deepEqual(visible({ ...place, top: 28_000, spare: 5 }), { from: 995, to: 1016 });
  assert.deepEqual(visible({ ...place, top: 279_720, spare: 5 }), { from: 9985, to: 10_000 });
});

test("a list that shrank, bounces or is empty draws no rows that are not there", () => {
  assert.deepEqual(visible({ ...place, count: 0 }), { from: 0, to: 0 });
  assert.deepEqual(visible({ ...place, top: -90, spare: 0 }), { from: 0, to: 11 });
  assert.deepEqual(visible({ ...place, top: 1e6, count: 3 }), { from: 3, to: 3 });
});

test("keys lead to rows of the list, other keys nowhere", () => {
  assert.equal(nextRow("ArrowDown", -1, 5, 3), 0);
  assert.equal(nextRow("ArrowDown", 4, 5, 3), 4);
  assert.equal(nextRow("ArrowUp", 0, 5, 3), 0);
  assert.equal(nextRow("PageDown", 0, 5, 3), 3);
  assert.equal(nextRow("End", 0, 5, 3), 4);
  assert.equal(nextRow("Home", 4, 5, 3), 0);
  assert.equal(nextRow("x", 1, 5, 3), null);
  assert.equal(nextRow("ArrowDown", -1, 0, 3), null);
});

test("the list scrolls as little as needed, and the header hides no row", () => {
  assert.equal(scrolledTo(5, { ...place, header: 28 }), 0);
  assert.equal(scrolledTo(9, { ...place, header: 28 }), 28);
  assert.equal(scrolledTo(3, { ...place, top: 500 }), 84);
});
