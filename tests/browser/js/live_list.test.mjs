// A list that loads one thing at a time: nothing that was asked for meanwhile is forgotten.
import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { LiveList } from "../../../proxy/page/static/lib/live_list.js";

/** A list whose requests are answered by hand: `answers` are [what, resolve, reject] of those under way. */
class Probe extends LiveList {
  constructor() {
    super({ rows: [], cursor: null, loaded: false, error: null, loading: true }, () => {});
    this.answers = [];
    this.pause = 0;
  }

  ask(what) {
    return new Promise((resolve, reject) => this.answers.push([what, resolve, reject]));
  }

  more() {
    if (this.mayLoad()) this.run(async () => this.set(await this.ask("more")));
  }

  async renew() {
    this.set(await this.ask("renew"));
  }

  async update(ids) {
    return this.ask(`update ${ids}`);
  }

  get asked() {
    return this.answers.map(([what]) => what);
  }

  async answer(value) {
    this.answers.shift()[1](value);
    await settled();
  }

  async fail(error) {
    this.answers.shift()[2](error);
    await settled();
  }
}

mock.timers.enable({ apis: ["setTimeout"] });
let now = 0;
mock.method(performance, "now", () => now);

/** What follows from an answer has been done, pauses without length included. */
async function settled() {
  await new Promise(setImmediate);
  mock.timers.tick(1);
  await new Promise(setImmediate);
}
const PAGE = { rows: ["a"], cursor: "c", loaded: true };

async function loaded() {
  const list = new Probe();
  list.more();
  await list.answer(PAGE);
  return list;
}

test("rows that are asked for while news are read come after them", async (t) => {
  const list = await loaded();
  t.after(() => list.close());
  list.take({ changed: [], all: true });
  list.more();
  assert.deepEqual(list.asked, ["renew"]);
  await list.answer({});
  assert.deepEqual(list.asked, ["more"]);
  await list.answer({ cursor: null });
  list.more();
  assert.deepEqual(list.asked, []); // there are no more
});

test("news that come while something is read are looked at afterwards, and what an update leaves, too", async (t) => {
  const list = new Probe();
  t.after(() => list.close());
  list.more();
  list.take({ changed: ["x", "y"], all: false });
  await list.answer(PAGE);
  assert.deepEqual(list.asked, ["update x,y"]);
  list.take({ changed: ["z"], all: false });
  await list.answer(["y"]);
  assert.deepEqual(list.asked, ["update z,y"]);
});

test("a failed look at news is told, and made again when asked for", async (t) => {
  const list = await loaded();
  t.after(() => list.close());
  list.take({ changed: ["x"], all: false });
  await list.fail(new Error("gone"));
  assert.deepEqual([list.state.error.message, list.asked], ["gone", []]);
  mock.timers.tick(5000);
  assert.deepEqual(list.asked, ["renew"]); // by itself, after a while
  await list.fail(new Error("gone"));
  assert.deepEqual(list.asked, []);
  list.retry();
  assert.deepEqual(list.asked, ["renew"]);
  await list.answer({});
  assert.equal(list.state.error, null);
});

test("a first page that fails is asked for again", async (t) => {
  const list = new Probe();
  t.after(() => list.close());
  list.more();
  await list.fail(new Error("down"));
  list.retry();
  assert.deepEqual(list.asked, ["more"]);
});

test("a cursor that is gone begins the list again", async (t) => {
  const list = await loaded();
  t.after(() => list.close());
  list.more();
  await list.fail(Object.assign(new Error("no such cursor"), { param: "cursor" }));
  assert.deepEqual([list.asked, list.state.loaded, list.state.rows], [["more"], false, []]);
});

test("a list that was closed asks for nothing", async () => {
  const list = await loaded();
  list.close();
  await settled();
  list.take({ changed: ["x"], all: true });
  assert.deepEqual(list.asked, []);
});

test("the longer a look takes, the longer is the pause after it", async (t) => {
  const list = await loaded();
  t.after(() => list.close());
  list.take({ changed: ["x"], all: false });
  now += 300;
  await list.answer([]);
  list.take({ changed: ["y"], all: false });
  mock.timers.tick(1198); // `settled` has let one pass
  assert.deepEqual(list.asked, []);
  mock.timers.tick(1);
  assert.deepEqual(list.asked, ["update y"]);
});

test("what comes after a list was closed is not shown", async () => {
  const list = await loaded();
  list.more();
  list.close();
  const shown = mock.method(list, "show");
  await list.answer({ rows: ["late"] });
  assert.deepEqual([shown.mock.callCount(), list.state.rows], [0, ["a"]]);
});

test("rows that were wanted during a failure are not asked for again and again", async (t) => {
  const list = await loaded();
  t.after(() => list.close());
  list.take({ changed: ["x"], all: false });
  list.more();
  await list.fail(new Error("down"));
  assert.deepEqual(list.asked, []);
});

test("rows that are loaded do not shorten the pause after a look", async (t) => {
  const list = await loaded();
  t.after(() => list.close());
  list.take({ changed: ["x"], all: false });
  now += 100;
  await list.answer([]); // a pause of 400 ms
  list.more();
  now += 1000;
  await list.answer(PAGE); // now one of 4000 ms
  list.take({ changed: ["y"], all: false });
  mock.timers.tick(3000);
  assert.deepEqual(list.asked, []);
  mock.timers.tick(1000);
  assert.deepEqual(list.asked, ["update y"]);
});
