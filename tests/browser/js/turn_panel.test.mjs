// The logic of the turn panel: differences of texts, JSON as it was written, commands to copy, times, links of results.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

const TURN = new URL("../../../proxy/page/static/views/session/turn/", import.meta.url);
const { differences, shortened } = await import(new URL("text_diff.js", TURN));
const { pretty } = await import(new URL("pretty_json.js", TURN));
const { json, quoted, readCommand, sendCommand } = await import(new URL("curl.js", TURN));
const { afterCharacters, cutAt, FOLDED } = await import(new URL("fold.js", TURN));
const { seenSpace } = await import(new URL("white_space.js", TURN));
const { timing } = await import(new URL("timing.js", TURN));
const { toolDifferences } = await import(new URL("tool_differences.js", TURN));
const { linked, messageText, sides } = await import(new URL("messages.js", TURN));

const side = (pieces, other) => pieces.filter(({ kind }) => kind !== other).map(({ text }) => text).join("");
const of = (pieces, kind) => pieces.filter((piece) => piece.kind === kind).map(({ text }) => text);

function holds(recorded, sent) {
  const { pieces } = differences(recorded, sent);
  assert.equal(side(pieces, "added"), recorded);
  assert.equal(side(pieces, "removed"), sent);
}

test("both sides of a difference are the texts, character for character", () => {
  for (const [old, now] of [
    ["", ""], ["a", ""], ["", "b"], ["a b c", "a x c"], ["x\n\n", "x\n"], ["tab\there", "tab  here"], ["emoji 👩‍🚀 a", "emoji 👩‍🚀 b"],
    ["😀", "😁"], ["aaa", "aaaa"], ["the end", "the  end"], ["\ud800x", "\ud800y"], ["e\u0301", "e\u0300"], ["ab ab ab", "ab ab"],
  ]) holds(old, now);
});

test("whole words are marked, and nothing else", () => {
  const { by, pieces } = differences("The date is Monday, the 3rd.", "The date is Tuesday, the 3rd.");
  assert.equal(by, "words");
  assert.deepEqual([of(pieces, "removed"), of(pieces, "added")], [["Monday"], ["Tuesday"]]);
});

test("a pair of surrogates is never torn apart", () => {
  for (const { text } of differences("😀", "😁").pieces) assert.ok(text.isWellFormed());
  for (const { text } of differences("a😀", "b😀").pieces) assert.ok(text.isWellFormed());
});

test("white space alone is a difference", () => {
  assert.notEqual(differences("a b", "a  b").by, "same");
  assert.equal(differences("a\n", "a\n").by, "same");
});

test("long texts are compared by lines, and texts that share nothing by the place alone", () => {
  const lines = Array.from({ length: 20_000 }, (_, number) => `line ${number}`);
  const changed = lines.map((line, number) => (number % 100 === 99 ? `${line}!` : line));
  const long = differences(lines.join("\n"), changed.join("\n"));
  assert.equal(long.by, "lines");
  assert.equal(of(long.pieces, "added").length, 200);
  const strange = differences(`${"a b ".repeat(400_000)}a`, `${"c d ".repeat(400_000)}c`);
  assert.equal(strange.by, "place");
  assert.deepEqual(strange.pieces.map(({ kind }) => kind), ["removed", "added"]);
});

test("a megabyte in which a word differs is compared by words", () => {
  const text = "word ".repeat(200_000);
  const { by, pieces } = differences(`${text}one ${text}`, `${text}two ${text}`);
  assert.equal(by, "words");
  assert.deepEqual([of(pieces, "removed"), of(pieces, "added")], [["one"], ["two"]]);
  const ends = differences(`a ${text}a`, `b ${text}b`);
  assert.deepEqual([ends.by, of(ends.pieces, "removed"), of(ends.pieces, "added")], ["words", ["a", "a"], ["b", "b"]]);
});

test("equal parts lose their middle, and it is all there", () => {
  const text = "x".repeat(5000);
  const { pieces } = differences(`${text} old ${text}`, `${text} new ${text}`);
  const short = shortened(pieces, 100);
  assert.deepEqual(short.map(({ kind }) => kind), ["gap", "same", "removed", "added", "same", "gap"]);
  assert.equal(side(short, "added"), `${text} old ${text}`);
  assert.equal(short[1].text.length, 100);
});

test("pretty JSON changes white space only", () => {
  const text = '{"a":1.0,"b":[1,12345678901234567890,{"c":"x, {y}: \\"z\\""}],"a":{},"d":[]}';
  const shown = pretty(text);
  assert.equal(shown, `{
  "a": 1.0,
  "b": [
    1,
    12345678901234567890,
    {
      "c": "x, {y}: \\"z\\""
    }
  ],
  "a": {},
  "d": []
}`);
  assert.deepEqual(JSON.parse(shown), JSON.parse(text));
  assert.equal(pretty("no json"), null);
  assert.equal(pretty('{"a":'), null);
  assert.equal(pretty("  1 "), "1");
  assert.equal(pretty(""), null);
});

test("commands hold no key, and nothing in them is run by a shell", () => {
  assert.equal(quoted("a'b"), "'a'\\''b'");
  assert.equal(readCommand("http://h/rl/$(x)'", true), "curl -s 'http://h/rl/$(x)'\\''' \\\n  -H \"authorization: Bearer $TOKENGROVE_ADMIN_KEY\"\n");
  const command = sendCommand("http://h/s", { content: "JSON\nrm -rf\n`x` $y \u202e\u0007" }, false);
  assert.deepEqual(command.split("\n").slice(2), ['{"content":"JSON\\nrm -rf\\n`x` $y \\u202e\\u0007"}', "JSON", ""]);
  assert.ok(!command.includes("authorization"));
});

test("JSON of commands says the same with characters that a terminal would act on", () => {
  const value = { text: "a\u202eb\u{e0041}c\u0085😀", name: ["\u2028"] };
  assert.deepEqual(JSON.parse(json(value)), value);
  assert.ok(!/[\u202e\u0085\u2028]/.test(json(value)) && json(value).includes("😀"));
});

test("times are the wait for the first token, and sampling", () => {
  assert.deepEqual(timing({ created_at: 10, first_token_at: 10.5, completed_at: 12.5 }, 41), { total: 2.5, wait: 0.5, sampling: 2, rate: 20 });
  assert.deepEqual(timing({ created_at: 10, first_token_at: null, completed_at: null }, 0), { total: null, wait: null, sampling: null, rate: null });
  assert.equal(timing({ created_at: 1, first_token_at: 1, completed_at: 1 }, 5).rate, null);
  assert.equal(timing({ created_at: 1, first_token_at: 1, completed_at: 1.0002 }, 50).rate, null); // in one piece
});

test("characters are counted as the server counts them", () => {
  assert.equal(afterCharacters("a😀b", 2), 3);
  assert.equal(afterCharacters("\ud83dx", 1), 1);
  assert.equal(afterCharacters("ab", 5), 2);
});

test("a long text is cut at the end of a line, or between characters", () => {
  assert.equal(cutAt("x".repeat(FOLDED), FOLDED), FOLDED);
  const lines = "some line\n".repeat(10_000);
  assert.equal(lines[cutAt(lines, FOLDED) - 1], "\n");
  const wide = "😀".repeat(10_000);
  assert.ok(wide.slice(0, cutAt(wide, 2_501)).isWellFormed());
});

test("white space that nobody would see becomes signs, and single spaces between words stay", () => {
  assert.equal(seenSpace("a b"), "a b");
  assert.equal(seenSpace(" a  b \n\tc"), "·a··b·↵\n⇥\tc");
});

const call = (id, name) => ({ id, type: "function", function: { name, arguments: "{}" } });

test("results are linked with the call that they answer", () => {
  const messages = [
    { role: "assistant", content: "", tool_calls: [call("a", "add"), call("b", "run")] },
    { role: "tool", content: "1", tool_call_id: "b" }, { role: "tool", content: "2", tool_call_id: "c" }, { role: "tool", content: "3" },
  ];
  assert.deepEqual(linked(messages).map((place) => place.call), [null, { name: "run", index: 0 }, null, null]);
  assert.equal(messageText(messages[0]), "add({})\nrun({})");
});

test("the differing messages of a fork are those that the server names", () => {
  const text = (content) => ({ role: "user", content });
  const turn = { messages: [text("a"), text("x"), text("c")] };
  const nearest = { messages: [text("a"), text("b"), text("c")], output: { role: "assistant", content: "d" } };
  const found = (why, count = 1) => sides({ message: { index: 1, why, count } }, turn, nearest);
  assert.deepEqual(found("content"), { recorded: [text("b")], sent: [text("x")] });
  assert.deepEqual(found("removed", 2), { recorded: [text("b"), text("c")], sent: [] });
  assert.deepEqual(found("inserted"), { recorded: [], sent: [text("x")] });
  assert.deepEqual(sides({ message: null }, turn, nearest), { recorded: [], sent: [] });
});

test("a shell sends exactly the JSON, and runs nothing of it", () => {
  const body = { content: "$(echo run) `echo run` $HOME \\\\ \nJSON\n'quoted' \"twice\" $((1 + 1))" };
  const said = execFileSync("sh", ["-c", `curl() { cat; }\n${sendCommand("http://h/it's/$(echo run)", body, true)}`], { encoding: "utf8" });
  assert.equal(said, `${JSON.stringify(body)}\n`);
  const address = "http://h/it's/$(echo run)?filter=`x`&y=\"";
  const asked = execFileSync("sh", ["-c", `curl() { printf %s "$2"; }\n${readCommand(address, false)}`], { encoding: "utf8" });
  assert.equal(asked, address);
});

test("a text that is a little longer than the fold is drawn whole", () => {
  assert.equal(cutAt("x".repeat(FOLDED + 600), FOLDED), FOLDED + 600);
  assert.equal(cutAt("x".repeat(FOLDED + 601), FOLDED), FOLDED);
});

test("an answer of the nearest turn is among what it recorded", () => {
  const user = { role: "user", content: "a" }, answer = { role: "assistant", content: "d" }, other = { role: "assistant", content: "e" };
  const found = sides({ message: { index: 1, why: "content", count: 1 } }, { messages: [user, other] }, { messages: [user], output: answer });
  assert.deepEqual(found, { recorded: [answer], sent: [other] });
});

test("only a result answers a call", () => {
  const messages = [{ role: "assistant", content: "", tool_calls: [call("a", "add")] }, { role: "user", content: "1", tool_call_id: "a" }];
  assert.deepEqual(linked(messages).map((place) => place.call), [null, null]);
});

test("an equal part that is hardly longer than its ends stays whole", () => {
  const pieces = [{ kind: "removed", text: "a" }, { kind: "same", text: "x".repeat(300) }, { kind: "added", text: "b" }];
  assert.deepEqual(shortened(pieces, 100), pieces);
  assert.deepEqual(shortened([pieces[0], { kind: "same", text: "x".repeat(301) }, pieces[2]], 100).map(({ kind }) => kind), ["removed", "same", "gap", "same", "added"]);
});

test("brackets and commas behind an escaped quote are text", () => {
  const text = '{"a":"\\"{,[","b":"\\\\"}';
  assert.equal(pretty(text), `{\n  "a": "\\"{,[",\n  "b": "\\\\"\n}`);
});

test("a clock that was set back gives no negative times", () => {
  assert.deepEqual(timing({ created_at: 10, first_token_at: 9, completed_at: 8 }, 5), { total: 0, wait: 0, sampling: 0, rate: null });
});

test("tools that differ are those that only one side has, or has otherwise, and else their order", () => {
  const tool = (name, about = "") => ({ type: "function", function: { name, about } });
  const found = (recorded, sent) => toolDifferences(recorded, sent).map(({ name, change }) => `${name} ${change}`);
  const [old, now] = [[tool("kept"), tool("gone"), tool("other", "a")], [tool("other", "b"), tool("kept"), tool("new")]];
  assert.deepEqual(found(old, now), ["gone removed", "other changed", "new added"]);
  const [order] = toolDifferences([tool("a"), tool("b")], [tool("b"), tool("a")]);
  assert.deepEqual([order.name, order.recorded, order.sent], ["(order)", "a\nb", "b\na"]);
});
