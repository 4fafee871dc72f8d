// What the page says of the samples of an export: options, pieces of bars, and why tokens are not trained.
import assert from "node:assert/strict";
import { test } from "node:test";

const at = "../../../proxy/page/static/views/session/";
const { OPTIONS, PADDED_OPTIONS, bodyOf, routeOption, valueOf, withOption } = await import(`${at}samples/samples_options.js`);
const { countsOf, ofSession, piecesOf, turnsOf } = await import(`${at}samples/samples_shape.js`);

const option = (name) => [...OPTIONS, ...PADDED_OPTIONS].find((each) => each.name === name);

test("without options the export is that of the API's defaults, as an outline", () => {
  assert.deepEqual(bodyOf("s", "g", {}), { session_id: "s", layout: "concat", drift: "fork", outline: true });
});

test("advantages ask for the whole group, validation sessions too, where there is one", () => {
  const body = bodyOf("s", "g", { advantages: "grpo", unrewarded: "zero" });
  assert.deepEqual(body.filter, { group_id: "g", validation: "include" });
  assert.deepEqual([body.session_id, body.advantages, body.unrewarded], [undefined, "grpo", "zero"]);
  assert.equal(bodyOf("s", null, { step_advantages: "grpo" }).session_id, "s");
});

test("fields that a layout refuses are not sent", () => {
  assert.equal("drift" in bodyOf("s", null, { layout: "tree", drift: "mask" }), false);
  assert.equal("keep" in bodyOf("s", null, { keep: "tail" }), false);
  const padded = { layout: "padded", prompt_length: "64", keep: "tail" }, body = bodyOf("s", null, padded);
  assert.deepEqual([body.prompt_length, body.response_length, body.on_too_long, "keep" in body], [64, 4096, "drop", false]);
  assert.equal(bodyOf("s", null, { ...padded, on_too_long: "truncate" }).keep, "tail");
});

test("what to train is one object", () => {
  const chosen = { turns: "last", constrained: "true", logprobs: "rule" };
  assert.deepEqual(bodyOf("s", null, chosen).train, { turns: "last", constrained: true, logprobs: "rule" });
});

test("an address may hold anything: what is not offered is the default", () => {
  assert.equal(valueOf(option("layout"), { layout: "__proto__" }), "concat");
  for (const given of ["-1", "1.5", "x", "", "99999999999"]) assert.equal(valueOf(option("prompt_length"), { prompt_length: given }), 1024);
  assert.equal(valueOf(option("prompt_length"), { prompt_length: "7" }), 7);
});

test("a default is left out of the address, and another option shows the first sample", () => {
  assert.deepEqual(withOption(option("layout"), { layout: "tree", sample: "4", turn: "a" }, "concat"), { layout: undefined, sample: undefined, turn: "a" });
  assert.equal(withOption(option("layout"), {}, "tree").layout, "tree");
  assert.equal(withOption(option("keep"), {}, "head").keep, undefined);
  assert.equal(withOption(option("prompt_length"), {}, "1024").prompt_length, undefined);
});

const sample = { tokens: 10, runs: [[0, 4, "prompt", 0], [4, 6, "trained", 0], [6, 7, "context", 1], [7, 10, "sampled", 1]] };

test("tokens are counted by kind", () => {
  assert.deepEqual(countsOf(sample), { prompt: 4, context: 1, trained: 2, sampled: 3, padding: 0 });
});

test("pieces stand where their tokens do, on the scale of the longest sample", () => {
  assert.deepEqual(piecesOf(sample, 100, 20).map(({ kind, x, width }) => [kind, x, width]), [
    ["prompt", 0, 20], ["trained", 20, 10], ["context", 30, 5], ["sampled", 35, 15],
  ]);
});

test("a bar has at most about two pieces a pixel, however many runs there are", () => {
  const runs = Array.from({ length: 60_000 }, (_, index) => [index, index + 1, index % 3 ? "trained" : "context", index]);
  const pieces = piecesOf({ runs }, 100, 60_000);
  assert.ok(pieces.length <= 200, `${pieces.length} pieces`);
  assert.deepEqual([pieces[0].start, pieces[pieces.length - 1].end], [0, 60_000]);
  assert.ok(pieces.every((piece, index) => !index || piece.start === pieces[index - 1].end));
});

test("a thin run beside a wide one is not lost", () => {
  const pieces = piecesOf({ runs: [[0, 999, "prompt", 0], [999, 1000, "trained", 0]] }, 100, 1000);
  assert.deepEqual(pieces.map((piece) => piece.kind), ["prompt", "trained"]);
});

test("of each turn it is said what is trained, and why the rest is not", () => {
  const turns = [{ interaction_id: "a", span: [4, 6] }, { interaction_id: "b", span: [7, 10] }, { interaction_id: "c", span: null }];
  const runs = { a: [[0, 2, null]], b: [[0, 2, "mark"], [2, 3, "grammar"]], c: [[0, 5, "drift"]] };
  assert.deepEqual(turnsOf({ ...sample, turns }, runs).map(({ id, output, trained, untrained }) => [id, output, trained, untrained]), [
    ["a", 2, 2, []], ["b", 3, 0, ["mark", "grammar"]], ["c", null, 0, ["drift"]],
  ]);
  assert.deepEqual(turnsOf({ ...sample, turns }, { b: [[0, 3, null]] })[1].untrained, ["elsewhere"]);
});

test("of a group's answer the session's own part is shown", () => {
  const answer = { samples: [{ session_id: "x" }, { session_id: "s" }], sessions: [{ session_id: "x" }, { session_id: "s" }] };
  assert.deepEqual(ofSession(answer, "s"), { samples: [{ session_id: "s" }], entry: { session_id: "s" }, compared: 2 });
  assert.equal(ofSession(answer, "gone").entry, undefined);
});

test("what is trained of a turn is counted over all of its runs", () => {
  const runs = [[0, 2, "prompt", 0], [2, 4, "trained", 0], [4, 5, "sampled", 0], [5, 8, "trained", 0], [8, 9, "sampled", 0]];
  const [turn] = turnsOf({ runs, turns: [{ interaction_id: "a", span: [2, 9] }] }, { a: [[0, 2, null], [2, 3, "mark"], [3, 6, null], [6, 7, "mark"]] });
  assert.deepEqual([turn.output, turn.trained, turn.untrained], [7, 5, ["mark"]]);
});

test("the routes of a session can be chosen, but for those without tokens", () => {
  const option = routeOption({ policy: { kind: "policy" }, opponent: { kind: "frozen" }, judge: { kind: "external" } });
  assert.deepEqual(option.values, ["", "policy", "opponent"]);
  assert.equal(routeOption(undefined), null);
  assert.equal(routeOption({ judge: { kind: "external" } }), null);
  assert.deepEqual(bodyOf("s", null, { route: "opponent" }).route, ["opponent"]);
  assert.equal("route" in bodyOf("s", null, {}), false);
  assert.equal(withOption(option, { route: "policy" }, "").route, undefined);
});
