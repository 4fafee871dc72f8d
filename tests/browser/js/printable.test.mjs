// What agents write is shown as it is, with signs for what would not be seen.
import assert from "node:assert/strict";
import { test } from "node:test";
import { fileName, hasHidden, parts, printable } from "../../../proxy/page/static/lib/printable.js";

test("ordinary text in any script is left alone", () => {
  for (const text of ["plain\n\ttext", "größe 日本語 עברית العربية", "👩‍👩‍👧 🏳️‍🌈", "<script>alert(1)</script>", ""]) {
    assert.equal(printable(text), text);
    assert.ok(!hasHidden(text));
  }
});

test("controls, bidirectional and invisible characters and lone surrogates become signs", () => {
  assert.equal(printable("a\0b\x1b[31m\rc"), "a␀b␛[31m␍c");
  assert.equal(printable("\u202eevil\u202c\u2066x\u2069"), "⟨RLO⟩evil⟨PDF⟩⟨LRI⟩x⟨PDI⟩");
  assert.equal(printable("zero\u200bwidth\ufeff"), "zero⟨ZWSP⟩width⟨BOM⟩");
  assert.equal(printable("\ud800x\udc00"), "⟨U+D800⟩x⟨U+DC00⟩");
  assert.equal(printable("tag\u{e0041}"), "tag⟨U+E0041⟩");
  assert.equal(printable("\x85\x9f\x7f"), "⟨NEL⟩⟨U+009F⟩⟨DEL⟩");
});

test("parts hold the whole text in order, with the name of each sign", () => {
  assert.deepEqual(parts("a\u202eb"), ["a", { sign: "⟨RLO⟩", name: "U+202E RLO" }, "b"]);
  assert.deepEqual(parts("\0"), [{ sign: "␀", name: "U+0000" }]);
});

test("on one line, new lines and tabs are signs", () => {
  assert.equal(printable("a\tb\nc", { line: true }), "a⇥b↵c");
});

test("a megabyte on one line takes no second", () => {
  assert.equal(printable("x\0".repeat(500_000)).length, 1_000_000);
});

test("a file name has no path, no dot at its start and no foreign characters", () => {
  assert.equal(fileName("../../etc/passwd"), "__.._etc_passwd");
  assert.equal(fileName("a\u202egpj.exe"), "a_gpj.exe");
  assert.equal(fileName(""), "_");
  assert.ok(fileName("x".repeat(500)).length <= 80);
});
