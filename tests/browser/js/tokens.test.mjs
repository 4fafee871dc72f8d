// The pure logic of the token view: texts, rows, colours, search.
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  band, classes, lowestFirst, nextUntrained, stateCounts, tokenModel,
} from "../../../proxy/page/static/views/session/tokens/token_model.js";
import { cellAt, imageAt, withFolds } from "../../../proxy/page/static/views/session/tokens/token_images.js";
import { tokenOptions } from "../../../proxy/page/static/views/session/tokens/token_options.js";
import { SPACE, layOut, placeOf, rowOf, space, tokenAt } from "../../../proxy/page/static/views/session/tokens/token_rows.js";
import { find, nextPlace, searchable } from "../../../proxy/page/static/views/session/tokens/token_search.js";
import { cell, escaped, width } from "../../../proxy/page/static/views/session/tokens/token_text.js";

/** Tokens as the API has them: a prompt of `prompt` texts, then an output of `output`. */
function told(prompt, output, more = {}) {
  const texts = [...prompt, ...output];
  const [start, end] = [prompt.length, texts.length];
  return {
    ids: texts.map((_, at) => 100 + at), texts, continues: [], broken: [], special: [],
    logprobs: texts.map((_, at) => (at < start ? null : -0.1 * (at - start))),
    versions: [{ start, end, version: 3 }],
    parts: [{ turn: 0, kind: "prompt", start: 0, end: start }, { turn: 0, kind: "output", start, end }],
    states: [
      { start: 0, end: start, state: "context", sample: null }, { start, end, state: "trained", sample: { turn: 0 } },
    ],
    meanings: {}, sections: [{ turns: [], tokens: end, differs: null }], lost: [], ...more,
  };
}

test("white space is visible, and a row ends behind a new line", () => {
  assert.deepEqual(cell(" the", 1, false), { shown: "·the", width: 4, breaks: false });
  assert.deepEqual(cell("\n\n", 1, false), { shown: "⏎⏎", width: 2, breaks: true });
  assert.deepEqual(cell("\t", 1, false), { shown: "⇥", width: 1, breaks: false });
});

test("wide characters take two columns, marks none", () => {
  assert.equal(width("日本"), 4);
  assert.equal(width("🙂"), 2);
  assert.equal(width("👩‍👩‍👧"), 2);
  assert.equal(width("e\u0301"), 1);
  assert.deepEqual(cell("\u0301", 1, false), { shown: "◌\u0301", width: 1, breaks: false });
});

test("what would not be seen is shown as a sign, and what has no text by its id", () => {
  assert.equal(cell("a\u202eb", 1, false).shown, "a⟨RLO⟩b");
  assert.equal(cell("\u0000", 1, false).shown, "␀");
  assert.deepEqual(cell("", 632, false), { shown: "⟨632⟩", width: 5, breaks: false });
  assert.deepEqual(cell(null, 7, false).shown, "⟨7⟩");
  assert.equal(cell("", 632, true).shown, "⋯");
});

test("a very long token is shortened in its cell", () => {
  const found = cell(" ".repeat(128), 1, false);
  assert.equal(found.width, 32);
  assert.match(found.shown, /…$/);
});

test("an escaped text hides nothing", () => {
  assert.equal(escaped('"a"\n'), '"\\"a\\"\\n"');
  assert.equal(escaped("a\u202eb\u00a0"), '"a\\u{202E}b\u00a0"');
});

test("every token stands in one row, in order, and no row is too wide", () => {
  const texts = Array.from({ length: 500 }, (_, at) => (at % 37 === 0 ? "\n" : "x".repeat(at % 9)));
  const model = tokenModel(told(texts.slice(0, 300), texts.slice(300)));
  const rows = layOut(model, 40);
  let next = 0;
  for (const row of rows) {
    assert.equal(row.from, next);
    if (row.of !== null) continue;
    let used = 0;
    for (let at = row.from; at < row.to; at += 1) {
      used += space(model, at);
      assert.equal(rowOf(rows, at), rows.indexOf(row));
      if (at < row.to - 1) assert.equal(model.cells[at].breaks, false);
    }
    assert.ok(used <= 40);
    next = row.to;
  }
  assert.equal(next, 500);
  assert.deepEqual(rows.filter((row) => row.of !== null).map((row) => [row.from, row.of]), [[0, 0], [300, 1]]);
});

test("a cell wider than a row has a row of its own", () => {
  const model = tokenModel(told(["a", "x".repeat(30), "b"], ["c"]));
  const rows = layOut(model, 20).filter((row) => row.of === null);
  assert.deepEqual(rows.map((row) => [row.from, row.to]), [[0, 1], [1, 2], [2, 3], [3, 4]]);
});

test("keys lead to the neighbours, to the cell below, and to the ends", () => {
  const model = tokenModel(told(["aa", "bb\n", "cccccc", "d\n"], ["e", "f"]));
  const rows = layOut(model, 60);
  const go = (key, token, more = {}) => tokenAt(key, { ctrl: false, token, model, rows, page: 2, ...more });
  assert.equal(go("ArrowRight", 0), 1);
  assert.equal(go("ArrowLeft", 0), 0);
  assert.equal(go("ArrowRight", 5), 5);
  assert.equal(go("ArrowDown", 1), 2);
  assert.equal(go("ArrowDown", 0), 2);
  assert.equal(go("ArrowUp", 3), 1);
  assert.equal(go("ArrowDown", 3), 5);
  assert.equal(go("ArrowDown", 4), 4);
  assert.equal(go("Home", 3), 2);
  assert.equal(go("End", 2), 3);
  assert.equal(go("Home", 5, { ctrl: true }), 0);
  assert.equal(go("End", 0, { ctrl: true }), 5);
  assert.equal(go("x", 0), null);
});

test("a place in a row counts the cells before it", () => {
  const model = tokenModel(told(["aa", "bbb"], ["c"]));
  const rows = layOut(model, 60);
  assert.equal(placeOf(model, rows[1], 0), SPACE);
  assert.ok(Math.abs(placeOf(model, rows[1], 1) - (2 + 2 * SPACE)) < 1e-9);
});

test("bands of probability", () => {
  const logprobs = [1, 0.95, 0.6, 0.2, 0.05].map(Math.log);
  assert.deepEqual([...logprobs, -30].map(band), [1, 1, 2, 3, 4, 5]);
  assert.equal(band(null), 0);
});

test("the classes of each colouring", () => {
  const model = tokenModel(told(["p"], ["a", "b", "c"], {
    logprobs: [null, -0.01, -9, null],
    versions: [{ start: 1, end: 3, version: 3 }, { start: 3, end: 4, version: 9 }],
    states: [
      { start: 0, end: 1, state: "context" }, { start: 1, end: 2, state: "trained" },
      { start: 2, end: 4, state: "grammar" },
    ],
  }));
  assert.deepEqual([...classes(model, "logprob")], [0, 1, 5, 6]);
  assert.deepEqual([...classes(model, "mask")], [0, 1, 2, 2]);
  assert.deepEqual([...classes(model, "version")], [0, 1, 1, 2]);
  assert.deepEqual(stateCounts(model), [["context", 1], ["trained", 1], ["grammar", 2]]);
  assert.deepEqual([...model.tags], [[2, "✕grammar"], [3, "v9"]]);
  assert.equal(nextUntrained(model, 0), 2);
  assert.equal(nextUntrained(model, 2), 2);
  assert.deepEqual(lowestFirst(model), [2, 1]);
});

test("nothing is untrained where all is trained", () => {
  assert.equal(nextUntrained(tokenModel(told(["p"], ["a"])), 0), -1);
});

test("search finds text across tokens, whatever its case, and ids", () => {
  const texts = ["He", "", "llo", " wor", "ld", " hello"];
  const index = searchable(texts);
  assert.deepEqual(find("hello", index, []), [[0, 2], [5, 5]]);
  assert.deepEqual(find("O W", index, []), [[2, 3]]);
  assert.deepEqual(find("", index, []), []);
  assert.deepEqual(find("nowhere", index, []), []);
  assert.deepEqual(find("#7", index, [7, 8, 7]), [[0, 0], [2, 2]]);
});

test("the next place goes around", () => {
  const places = [[2, 3], [8, 8]];
  assert.equal(nextPlace(places, 2, 1), 1);
  assert.equal(nextPlace(places, 8, 1), 0);
  assert.equal(nextPlace(places, 2, -1), 1);
  assert.equal(nextPlace(places, 9, -1), 1);
  assert.equal(nextPlace([], 0, 1), -1);
});

test("sixty thousand tokens are laid out", () => {
  const texts = Array.from({ length: 60_000 }, (_, at) => [" the", "日本", "\n", "x".repeat(at % 12)][at % 4]);
  const model = tokenModel(told(texts.slice(0, 30_000), texts.slice(30_000)));
  const rows = layOut(model, 90);
  assert.equal(rows.at(-1).to, 60_000);
  assert.equal(model.cells.length, 60_000);
});

test("a band begins with its least probability", () => {
  assert.deepEqual([0.5, 0.4999, 0].map((share) => band(Math.log(share))), [2, 3, 5]);
});

test("tokens without a text show their own id each, and a continuation its sign", () => {
  const model = tokenModel({ ...told(["a", "", ""], ["", "b"], { continues: [1] }), ids: [1, 5, 7, 8, 9] });
  assert.deepEqual(model.cells.map(({ shown }) => shown), ["a", "⋯", "⟨7⟩", "⟨8⟩", "b"]);
  assert.deepEqual([...model.kindOf], [0, 2, 8, 8, 0]);
});

test("the token where a section begins to differ is marked", () => {
  const differs = (index) => tokenModel(told(["a", "b"], ["c"], { sections: [{ turns: [], tokens: 3, differs: { index } }] }));
  assert.deepEqual([...differs(1).tags], [[1, "≠"]]);
  assert.deepEqual([...differs(3).tags], []);
});

test("the next run that is not trained is behind the token, then the first one", () => {
  const model = tokenModel(told(["p"], ["a", "b", "c", "d"], {
    states: [
      { start: 0, end: 1, state: "context" }, { start: 1, end: 2, state: "grammar" },
      { start: 2, end: 4, state: "trained" }, { start: 4, end: 5, state: "mark" },
    ],
  }));
  assert.deepEqual([0, 1, 2, 4].map((at) => nextUntrained(model, at)), [1, 4, 4, 1]);
});

test("a row is filled to its last column, and begins anew behind a new line", () => {
  const texts = ["aa", "bb", "cc\n", "dd", "ee", "ff"];
  const model = tokenModel(told(texts, ["x"]));
  const columns = space(model, 0) + space(model, 1);
  const rows = layOut(model, columns).filter((row) => row.of === null);
  assert.deepEqual(rows.map((row) => [row.from, row.to]), [[0, 2], [2, 3], [3, 5], [5, 6], [6, 7]]);
});

test("a cell with a tag begins behind it, with a space on either side", () => {
  const model = tokenModel(told(["p"], ["aa", "bb"], { versions: [{ start: 1, end: 2, version: 3 }, { start: 2, end: 3, version: 4 }] }));
  const row = layOut(model, 60).at(-1);
  assert.ok(Math.abs(placeOf(model, row, 2) - (SPACE + 2 + SPACE + "v4".length + SPACE + SPACE)) < 1e-9);
  assert.ok(Math.abs(space(model, 2) - (SPACE + "v4".length + SPACE + SPACE + 2)) < 1e-9);
});

test("up and down lead to the cell below the middle of a wide one", () => {
  const model = tokenModel(told(["wwwwwwwwww\n", "a", "b", "c", "d", "e", "f", "g"], ["x"]));
  const rows = layOut(model, 60);
  assert.equal(tokenAt("ArrowDown", { ctrl: false, token: 0, model, rows, page: 2 }), 5);
});

test("search finds places that stand side by side", () => {
  assert.deepEqual(find("ab", searchable(["ab", "a", "b"]), []), [[0, 0], [1, 2]]);
});

test("a row ends behind a token with a new line, wherever in it that is", () => {
  assert.equal(cell("\n  x", 1, false).breaks, true);
});

test("the options of the samples in the address are those of an export that the API makes", () => {
  assert.deepEqual(tokenOptions({}), {});
  assert.deepEqual(tokenOptions({ layout: "tree", drift: "mask", turn: "3", colour: "mask" }), { layout: "tree" });
  assert.deepEqual(tokenOptions({ drift: "mask", train: "last" }), { drift: "mask", train: '{"turns":"last"}' });
  const masked = { filter: '{"min_version":2}', stale: "mask" };
  assert.deepEqual(tokenOptions(masked), masked);
  const padded = { layout: "padded", prompt_length: "1024", response_length: "4096", on_too_long: "drop" };
  assert.deepEqual(tokenOptions({ layout: "padded", keep: "tail" }), padded);
  assert.deepEqual(tokenOptions({ layout: "concat", prompt_length: "7", on_too_long: "truncate" }), { layout: "concat" });
});

const SEEN = { digest: "3f2a91c0".repeat(8), start: 3, length: 4, width: 56, height: 56 };
const seeing = () => tokenModel(told(["a", "b", "c", "", "", "", "", "d"], ["e", "f"], { images: [SEEN] }));

test("the tokens of an image are one cell until they are unfolded", () => {
  const folded = withFolds(seeing(), new Set());
  assert.equal(folded.cells[3].shown, "56×56 4 tokens");
  assert.deepEqual([...folded.hidden], [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]);
  assert.deepEqual([2, 3, 6, 7].map((at) => cellAt(folded, at)), [2, 3, 3, 7]);
  assert.deepEqual([2, 3, 6, 7].map((at) => imageAt(folded, at)?.start ?? null), [null, 3, 3, null]);
  const open = withFolds(seeing(), new Set([3]));
  assert.deepEqual([...open.hidden], new Array(10).fill(0));
  assert.equal(open.cells[3].shown, "⟨103⟩");
});

test("keys pass over what is folded, in both directions and to the ends of rows", () => {
  const model = withFolds(seeing(), new Set());
  const rows = layOut(model, 80);
  const key = (name, token, ctrl = false) => tokenAt(name, { ctrl, token, model, rows, page: 3 });
  assert.deepEqual([key("ArrowRight", 2), key("ArrowRight", 3), key("ArrowLeft", 7), key("ArrowLeft", 0), key("ArrowRight", 9)], [3, 7, 3, 0, 9]);
  assert.deepEqual([key("End", 0), key("End", 0, true), key("Home", 9, true)], [7, 9, 0]);
});

test("an image at the end of a prompt is reached by End, and rows hold every token once", () => {
  const model = withFolds(tokenModel(told(["a", "", "", ""], ["e"], { images: [{ ...SEEN, start: 1, length: 3 }] })), new Set());
  const rows = layOut(model, 18);
  assert.equal(tokenAt("End", { ctrl: false, token: 1, model, rows, page: 3 }), 1);
  assert.deepEqual(rows.filter((row) => row.of === null).map(({ from, to }) => [from, to]), [[0, 1], [1, 4], [4, 5]]);
  assert.equal(space(model, 2), 0);
});

test("a span outside of the tokens is shown as tokens, not as an image", () => {
  const model = tokenModel(told(["a"], ["e"], { images: [{ ...SEEN, start: 1, length: 9 }] }));
  assert.equal(withFolds(model, new Set()), model);
});

test("the route of the address is that of the export whose states are shown", () => {
  assert.deepEqual(tokenOptions({ route: "opponent" }), { route: '["opponent"]' });
  assert.equal("route" in tokenOptions({}), false);
});
