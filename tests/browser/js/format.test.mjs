// Numbers, times and ids as people read them.
import assert from "node:assert/strict";
import { test } from "node:test";
import * as format from "../../../proxy/page/static/lib/format.js";

const each = (convert, cases) => cases.forEach(([given, shown]) => assert.equal(convert(given), shown, JSON.stringify(given)));

test("what is no number is a dash everywhere", () => {
  for (const convert of [format.number, format.compact, format.reward, format.logprob, format.percent, format.duration, format.when, format.bytes]) {
    for (const missing of [null, undefined, NaN, Infinity, "5"]) assert.equal(convert(missing), "–");
  }
  assert.equal(format.age(null, 5), "–");
  assert.equal(format.when(1e15), "–");
});

test("numbers have separators and a real minus sign", () => {
  each(format.number, [[0, "0"], [12345.6789, "12,345.679"], [-1200, "−1,200"]]);
});

test("a compact number has three digits that matter, and never 1000 of a unit", () => {
  each(format.compact, [[0, "0"], [999, "999"], [1000, "1k"], [1234, "1.2k"], [12345, "12.3k"], [99949, "99.9k"], [123456, "123k"],
    [999400, "999k"], [999600, "1M"], [1.25e6, "1.3M"], [2e9, "2G"], [-1500, "−1.5k"], [0.1234, "0.12"], [15.26, "15.3"]]);
});

test("rewards have up to three decimals and no negative zero", () => {
  each(format.reward, [[1, "1"], [0.123456, "0.123"], [-0.5, "−0.5"], [-0.0001, "0"], [0, "0"]]);
});

test("logprobs line up", () => {
  each(format.logprob, [[0, "0.00"], [-0.123, "−0.12"], [-12, "−12.00"]]);
});

test("a duration has two units at most, and never 60 of the smaller one", () => {
  each(format.duration, [[0, "0 ms"], [0.0012, "1.2 ms"], [0.0456, "46 ms"], [0.25, "0.25 s"], [1.23, "1.2 s"], [12.3, "12 s"],
    [59.4, "59 s"], [59.7, "1 min"], [60, "1 min"], [65, "1 min 5 s"], [119.6, "2 min"], [3599.4, "59 min 59 s"], [3599.6, "1 h"],
    [7260, "2 h 1 min"], [86399, "1 d"], [90000, "1 d 1 h"], [-5, "−5 s"]]);
});

test("an age is whole units that have passed", () => {
  const now = 1_000_000;
  each((ago) => format.age(now - ago, now), [[-5, "now"], [0.5, "now"], [1, "1 s"], [59.9, "59 s"], [60, "1 min"], [3599, "59 min"],
    [3600, "1 h"], [172799, "47 h"], [172800, "2 d"]]);
});

test("bytes and counted words", () => {
  each(format.bytes, [[0, "0 B"], [999, "999 B"], [1200, "1.2 kB"], [3.44e6, "3.4 MB"], [2e9, "2 GB"]]);
  assert.equal(format.plural(1, "turn"), "1 turn");
  assert.equal(format.plural(0, "turn"), "0 turns");
  assert.equal(format.plural(1200, "entry", "entries"), "1,200 entries");
});

test("a shortened text keeps both ends, is no longer than asked, and cuts no emoji in half", () => {
  assert.equal(format.shorten("short", 10), "short");
  assert.equal(format.shorten("a-long-session-id-0042", 12), "a-long-s…042");
  for (const text of ["😀".repeat(50), "x".repeat(1e6), "é😀".repeat(40)]) {
    const shown = format.shorten(text, 20);
    assert.ok([...shown].length <= 20);
    assert.doesNotMatch(shown, /\p{Surrogate}/u);
  }
  assert.equal(format.shorten("😀".repeat(12), 12), "😀".repeat(12));
});

test("a clipped text keeps its beginning", () => {
  assert.equal(format.clip("hello", 5), "hello");
  assert.equal(format.clip("hello world", 6), "hello…");
  assert.doesNotMatch(format.clip("😀😀😀😀", 4), /\p{Surrogate}/u);
});

test("a moment is written in the reader's time zone, its month from 01", () => {
  assert.equal(format.when(new Date(2026, 0, 3, 4, 5, 6).getTime() / 1000), "2026-01-03 04:05:06");
  assert.equal(format.when(new Date(2026, 11, 31, 23, 59, 0).getTime() / 1000), "2026-12-31 23:59:00");
});

test("bytes are never 1000 of a unit", () => {
  each(format.bytes, [[999_940, "999.9 kB"], [999_960, "1 MB"], [1e6, "1 MB"], [999_960_000, "1 GB"]]);
});
