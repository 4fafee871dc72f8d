// The logic of images in the page: words, places in a text, and which pictures are held in memory.
import assert from "node:assert/strict";
import { test } from "node:test";
import { ImageStore } from "../../../proxy/page/static/views/session/images/image_store.js";
import { facts, otherImages, pieces, spokenImage } from "../../../proxy/page/static/views/session/images/image_words.js";

const DIGEST = "3f2a91c0".repeat(8);
const image = (at, more = {}) => ({ digest: DIGEST, at, width: 1280, height: 800, ...more });

test("what is said of an image is what is known of it", () => {
  assert.deepEqual(facts(image(0)), ["1,280 × 800", "3f2a91c03f2a…"]);
  const known = facts(image(0, { detail: "low", tokens: 512 }), { type: "image/png", size: 12_345 });
  assert.deepEqual(known, ["1,280 × 800", "PNG", "12.3 kB", "low detail", "512 tokens", "3f2a91c03f2a…"]);
  assert.equal(spokenImage({ digest: "ab", length: 1 }), "Image 1 token, ab");
  assert.deepEqual(facts(image(0, { detail: "constructor" }), { type: "toString" }), facts(image(0)));
});

test("images stand between the texts, counted in characters as Python counts them", () => {
  const found = pieces("a🙂b", [image(0), image(2), image(2), image(3)]);
  assert.deepEqual(found.map((piece) => piece.text ?? piece.index), [0, "a🙂", 1, 2, "b", 3]);
  assert.deepEqual(pieces("text", []).map(({ text }) => text), ["text"]);
  assert.deepEqual(pieces("", [image(0)]).map(({ index }) => index), [0]);
});

test("a place outside of the text, or before the last one, loses no text", () => {
  const found = pieces("text", [image(3), image(1), image(99), image(-4)]);
  assert.equal(found.map((piece) => piece.text ?? "").join(""), "text");
  assert.equal(found.filter((piece) => piece.image).length, 4);
});

test("of two lists of images, those that only one has are told, as often as it has them more", () => {
  const [one, two] = [image(0), { ...image(0), digest: "ab" }];
  assert.deepEqual(otherImages([one, two], [one]), { recorded: [two], sent: [] });
  assert.deepEqual(otherImages([one, one], [one]), { recorded: [one], sent: [] });
  assert.deepEqual(otherImages([one], [{ ...one, detail: "low" }]), { recorded: [one], sent: [{ ...one, detail: "low" }] });
  assert.deepEqual(otherImages([one], [{ ...one, at: 7 }]), { recorded: [], sent: [] });
});

/** A store whose reads are answered by hand: `reads` by key, `freed` URLs. */
function held(most) {
  const reads = new Map();
  const freed = [];
  const read = (key, { signal }) => new Promise((resolve, reject) => {
    reads.set(key, { signal, answer: (size = 10) => resolve({ url: `blob:${key}`, type: "image/png", size }), fail: reject });
  });
  return { reads, freed, store: new ImageStore({ read, free: (url) => freed.push(url), most, atOnce: 2 }) };
}

const settled = () => new Promise((resolve) => setImmediate(resolve));

test("a picture is read once for all who show it, and kept for the next while there is room", async () => {
  const { reads, freed, store } = held(100);
  const both = [store.hold("a"), store.hold("a")];
  reads.get("a").answer();
  assert.deepEqual((await Promise.all(both)).map(({ url }) => url), ["blob:a", "blob:a"]);
  store.release("a");
  store.release("a");
  reads.clear();
  assert.equal((await store.hold("a")).url, "blob:a");
  assert.deepEqual([reads.size, freed], [0, []]);
});

test("beyond the room, what nobody shows is given back, the one released first at first; what is shown never is", async () => {
  const { reads, freed, store } = held(25);
  for (const key of ["a", "b", "c", "d"]) {
    const waiting = store.hold(key);
    reads.get(key).answer();
    await waiting;
  }
  assert.deepEqual([store.bytes, freed], [40, []]);
  for (const key of ["c", "a", "b"]) store.release(key);
  assert.deepEqual([freed, store.bytes], [["blob:c", "blob:a"], 20]);
  store.release("d");
  store.release("d");
  assert.deepEqual([freed.length, store.bytes], [2, 20]);
});

test("few are read at a time, and those that left the view are not read at all", async () => {
  const { reads, store } = held(100);
  const promises = ["a", "b", "c", "d"].map((key) => store.hold(key).catch(({ name }) => name));
  assert.deepEqual([...reads.keys()], ["a", "b"]);
  store.release("c");
  store.release("a");
  assert.equal(reads.get("a").signal.aborted, true);
  reads.get("a").fail(new DOMException("given up", "AbortError"));
  await settled();
  assert.deepEqual([...reads.keys()], ["a", "b", "d"]);
  reads.get("b").answer();
  reads.get("d").answer();
  assert.deepEqual((await Promise.all(promises)).map((each) => each.url ?? each), ["AbortError", "blob:b", "AbortError", "blob:d"]);
});

test("a picture that comes after nobody waits for it is given back", async () => {
  const { reads, freed, store } = held(100);
  store.hold("a").catch(() => null);
  const late = reads.get("a");
  store.release("a");
  const again = store.hold("a");
  reads.get("a").answer();
  late.answer();
  await again;
  await settled();
  assert.deepEqual([freed, store.bytes], [["blob:a"], 10]);
});

test("a failure is told to all who wait, and the next who asks tries again", async () => {
  const { reads, store } = held(100);
  const both = [store.hold("a"), store.hold("a")].map((each) => each.catch(({ message }) => message));
  reads.get("a").fail(new Error("no server"));
  assert.deepEqual(await Promise.all(both), ["no server", "no server"]);
  store.release("a");
  store.release("a");
  const next = store.hold("a");
  reads.get("a").answer();
  assert.equal((await next).url, "blob:a");
});

test("after a failure the next who asks tries again, though others who heard of it still stand there", async () => {
  const { reads, store } = held(100);
  const first = store.hold("a").catch(({ message }) => message);
  reads.get("a").fail(new Error("no server"));
  assert.equal(await first, "no server");
  const next = store.hold("a");
  reads.get("a").answer();
  assert.equal((await next).url, "blob:a");
});

test("of pictures that nobody shows, the one released first is given back first", async () => {
  const { reads, freed, store } = held(25);
  for (const key of ["a", "b"]) {
    const waiting = store.hold(key);
    reads.get(key).answer();
    await waiting;
  }
  for (const key of ["b", "a"]) store.release(key);
  assert.deepEqual(freed, []);
  const third = store.hold("c");
  reads.get("c").answer();
  await third;
  assert.deepEqual(freed, ["blob:b"]);
});
