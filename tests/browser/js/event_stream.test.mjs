// Server-sent events out of pieces of text.
import assert from "node:assert/strict";
import { test } from "node:test";
import { backOff, eventParser } from "../../../proxy/page/static/lib/event_stream.js";

const STREAM = "retry: 2000\n\nevent: a\ndata: {\"n\": 1}\n\n: keepalive\nevent: b\ndata: x\ndata: y\n\ndata:z\n\n";
const EVENTS = [{ event: "a", data: '{"n": 1}' }, { event: "b", data: "x\ny" }, { event: "message", data: "z" }];

test("events are the same whatever pieces they come in", () => {
  for (const newline of ["\n", "\r\n", "\r"]) {
    const text = `${STREAM.replaceAll("\n", newline)}:\n`;
    for (const size of [1, 2, 3, 7, text.length]) {
      const parser = eventParser();
      const found = [];
      for (let at = 0; at < text.length; at += size) found.push(...parser.feed(text.slice(at, at + size)));
      assert.deepEqual(found, EVENTS, `${JSON.stringify(newline)} in pieces of ${size}`);
    }
  }
});

test("half an event is none yet", () => {
  const parser = eventParser();
  assert.deepEqual(parser.feed("event: a\ndata: 1\n"), []);
  assert.deepEqual(parser.feed("\n"), [{ event: "a", data: "1" }]);
});

test("waits double up to half a minute, and are spread", () => {
  assert.deepEqual([1, 2, 3, 4, 5, 6, 50].map((attempt) => backOff(attempt)), [1, 2, 4, 8, 16, 30, 30]);
  assert.deepEqual([backOff(1, 0), backOff(1, 1)], [0.75, 1.25]);
});
