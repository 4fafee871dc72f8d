// The pure logic of what trainers told: words, charts, and the colours of streams.
import assert from "node:assert/strict";
import { test } from "node:test";
import { bandWords, bandsOf, byToken, streamClasses, streams, value } from "../../../proxy/page/static/views/session/tokens/stream_bands.js";
import { charted, kl, ratio, samplerName, summed, trainersOf } from "../../../proxy/page/static/views/training/training_words.js";

const PARTS = [
  { kind: "prompt", start: 0, end: 2, interaction_id: "a" }, { kind: "output", start: 2, end: 4, interaction_id: "a" },
  { kind: "prompt", start: 4, end: 5, interaction_id: "b" }, { kind: "output", start: 5, end: 7, interaction_id: "b" },
];

test("streams are those of the turns of the path, the newest step first", () => {
  const told = [
    { interaction_id: "a", trainer: "t", step: 1, streams: ["entropy", "logprobs"] },
    { interaction_id: "b", trainer: "t", step: 2, streams: ["logprobs"] }, { interaction_id: "c", trainer: "t", step: 9, streams: ["x"] },
  ];
  assert.deepEqual(streams(told, PARTS).map(({ key }) => key), ["t 2 logprobs", "t 1 entropy", "t 1 logprobs"]);
  assert.equal(streams(told, PARTS)[0].words, "t, step 2: logprobs");
});

test("values stand at the tokens of their outputs", () => {
  const tokens = { ids: new Array(7).fill(1), parts: PARTS };
  assert.deepEqual(byToken({ b: [0.5, null] }, tokens), [null, null, null, null, null, 0.5, null]);
});

test("bands have about as many values each, and equal values share one", () => {
  assert.deepEqual(bandsOf([null]), []);
  assert.deepEqual(bandsOf([0, 1, 0, 0, 1, null]), [0, 1]);
  assert.deepEqual(bandsOf(Array.from({ length: 100 }, (_, at) => at)), [19, 39, 59, 79, 99]);
  const model = { count: 5, sampled: [0, 1, 1, 1, 1] };
  assert.deepEqual([...streamClasses(model, [null, 0, 1, null, 0], [0, 1])], [0, 1, 5, 6, 1]);
  assert.deepEqual([...streamClasses(model, [null, 3, 3, 3, 3], [3])], [0, 1, 1, 1, 1]);
  assert.deepEqual(bandWords([0, 1]), [[1, "≤ 0"], [5, "≤ 1"]]);
  assert.deepEqual(bandWords([-0.123456]), [[1, "−0.1235"]]);
});

test("numbers have the digits that matter", () => {
  assert.deepEqual([null, 0, 0.00041234, 1.23e-7, 0.5].map(kl), ["–", "0", "0.000412", "1.2×10⁻⁷", "0.5"]);
  assert.deepEqual([undefined, 1, 1.0423, 4.85e8].map(ratio), ["–", "1.00", "1.04", "4.9e+8"]);
  assert.deepEqual([null, 2, -0.5].map(value), ["–", "2", "−0.5000"]);
  assert.equal(samplerName({ server: "http://e:1", dtype: "bfloat16", quantization: "fp8" }), "http://e:1 (bfloat16 fp8)");
  assert.equal(samplerName({ server: "", dtype: "", quantization: "" }), "the engine of the server");
});

test("charts are by step, and the trainer that told last comes first", () => {
  const steps = [
    { trainer: "a", step: 2, noted_at: 20, tokens: 10, masked: 3, kl: null }, { trainer: "a", step: 1, noted_at: 10, tokens: 5, masked: 0, kl: 0.5 },
    { trainer: "b", step: 0, noted_at: 30, tokens: 1, masked: 0, kl: 0 },
  ];
  assert.deepEqual(trainersOf(steps), ["b", "a"]);
  assert.deepEqual(charted(steps.slice(0, 2))("trained", "masked", "kl"), [[1, 2], [5, 7], [0, 3], [0.5, null]]);
});

test("a turn has the sums of its parts", () => {
  const part = { tokens: 4, masked: 1, clipped: 0, compared: 4, kl: 0.5, largest_ratio: 2 };
  assert.deepEqual(summed([part, { ...part, compared: 0, kl: null, largest_ratio: null }]), {
    tokens: 8, masked: 2, clipped: 0, kl: 0.5, largest_ratio: 2,
  });
  assert.equal(summed([{ ...part, compared: 0, kl: null, largest_ratio: null }]).kl, null);
});
