// What was recorded beside tokens, in words.
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  expertWords, hueOf, keptWords, layerWords, listed, mass, withoutExperts,
} from "../../../proxy/page/static/views/session/tokens/column_words.js";
import { recordedWords } from "../../../proxy/page/static/views/session/turn/recorded_words.js";

const kept = (more) => ({ number: 37, excluded: false, ids: [1], texts: ["a"], more: 36, mass: 0.9312, ...more });

test("a kept set has its size, that of the vocabulary, and its mass", () => {
  assert.equal(keptWords(kept(), 151_936), "kept 37 of 151,936 (mass 0.93)");
  assert.equal(keptWords(kept({ excluded: true, number: 1200 }), 151_936), "kept all but 1,200 of 151,936 (mass 0.93)");
  assert.equal(keptWords(kept({ mass: null }), null), "kept 37 (mass not known)");
});

test("a mass below 1 is never written as 1", () => {
  assert.equal(mass(1), "1");
  assert.equal(mass(0.9987), "0.9987");
  assert.equal(mass(0.9999999), "almost 1");
  assert.equal(mass(0.000123), "0.00012");
});

test("ids are listed by their texts, and the others are counted", () => {
  const ids = Array.from({ length: 32 }, (_, at) => at);
  const row = kept({ ids, texts: ids.map((id) => (id === 1 ? null : id === 2 ? "\u202e\n" : `t${id}`)) });
  const { texts, more } = listed(row);
  assert.deepEqual(texts.slice(0, 3), ['"t0"', "#1", '"\\u{202E}\\n"']);
  assert.deepEqual([texts.length, more], [8, 29]);
});

test("experts are named by layer, and a missing one is not expert 0", () => {
  assert.equal(expertWords([[5, 17], [null, 0]]), "layer 0: 5 17 · layer 1: – 0");
  assert.equal(layerWords([255], 47), "layer 47: 255");
});

test("consecutive experts have hues far apart, the same each time", () => {
  const hues = Array.from({ length: 128 }, (_, expert) => hueOf(expert));
  assert.deepEqual(hues, Array.from({ length: 128 }, (_, expert) => hueOf(expert)));
  for (let at = 1; at < hues.length; at += 1) {
    const turned = Math.abs(hues[at] - hues[at - 1]);
    assert.ok(Math.min(turned, 360 - turned) > 90);
  }
  assert.ok(hues.every((hue) => hue >= 0 && hue <= 360));
});

test("the last token has no experts yet, others are missing", () => {
  assert.match(withoutExperts(9, 10), /^none yet/);
  assert.equal(withoutExperts(8, 10), "missing");
});

test("what a turn recorded is said with what is missing", () => {
  const said = (replay) => recordedWords(replay).map(({ name, words, whole }) => [`${name}: ${words}`, whole]);
  assert.deepEqual(said({ kept: { rows: 120, missing: 0, stored: true } }), [["kept sets: all 120 tokens", true]]);
  const experts = (rows, missing, stored = true) => said({ routed_experts: { rows, missing, stored } })[0];
  assert.deepEqual(experts(540, 12), ["routed experts: 12 of 540 positions missing", false]);
  assert.deepEqual(experts(540, 540, false), ["routed experts: all 540 positions missing", false]);
  assert.deepEqual(experts(540, 12, false), ["routed experts: removed since", false]);
  assert.deepEqual(experts(0, 0, false), ["routed experts: no positions", true]);
  assert.deepEqual(said({ a_third_column: { rows: 1, missing: 0, stored: true } }), [["a third column: all 1 token", true]]);
  const row = { rows: 3, missing: 0, stored: true };
  assert.deepEqual(said({ top_token_ids: row, top_logprobs: row }), [["alternatives: all 3 tokens", true]]);
  assert.deepEqual(said(undefined), []);
});
