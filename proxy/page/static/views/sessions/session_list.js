// The sessions that a filter selects: loaded page by page, and kept up to date while they are looked at.
import { get } from "../../lib/api.js";
import { useLive, useSessionChanges } from "../../lib/events.js";
import { useCallback, useEffect, useRef, useState } from "../../lib/html.js";
import { appended, changed, portion, renewed } from "./rows.js";

const FIRST = 100; // sessions of the first page: what is seen, and some more
const NEXT = 400;
const RENEWED = 500; // rows that are read again when news were missed
const PAUSE_MS = 1000; // between two looks at what has changed
const POLL_MS = 10_000; // while no news arrive
const EMPTY = { rows: [], cursor: null, counts: null, error: null, loading: true, loaded: false };

/**
 * {rows, counts, error, loading, loaded, whole, more(), reload()} of a filter (an object) and an order. `loaded`: the first page came.
 * `whole`: there are no more. `counts`: by status, null if the server cannot count them.
 */
export function useSessionList(filter, order) {
  const asked = JSON.stringify([filter, order]);
  const [state, setState] = useState({ ...EMPTY, asked });
  const list = useRef(null);
  useEffect(() => {
    setState({ ...EMPTY, asked });
    list.current = new SessionList(filter, order, (next) => setState({ ...next, asked }));
    list.current.more();
    return () => list.current.close();
  }, [asked]);
  useSessionChanges((news) => list.current?.take(news));
  usePolling(useLive(), list);
  const more = useCallback(() => list.current?.more(), []);
  const reload = useCallback(() => list.current?.retry(), []);
  const now = state.asked === asked ? state : EMPTY;
  return { ...now, whole: now.loaded && now.cursor === null, more, reload };
}

function usePolling(live, list) {
  useEffect(() => {
    if (live !== "reconnecting") return undefined;
    const timer = setInterval(() => list.current?.take({ changed: new Set(), all: true }), POLL_MS);
    return () => clearInterval(timer);
  }, [live]);
}

/** One list: loads one thing at a time, so that pages and news do not overtake each other. */
class SessionList {
  constructor(filter, order, show) {
    Object.assign(this, { filter, order, show, state: { ...EMPTY } });
    this.control = new AbortController();
    this.news = { ids: new Set(), all: false };
    this.busy = false;
    this.timer = null;
  }

  close() {
    this.control.abort();
    clearTimeout(this.timer);
  }

  /** Load the next rows, as many as a page has: a page of the server may be short, or empty. */
  more() {
    if (this.busy || (this.state.loaded && this.state.cursor === null)) return;
    this.run(async () => {
      const wanted = this.state.rows.length + (this.state.loaded ? NEXT : FIRST);
      do {
        const limit = Math.max(1, wanted - this.state.rows.length);
        const first = !this.state.loaded;
        const page = await this.read(this.filter, { limit, cursor: this.state.cursor, counts: first });
        const counts = first ? page.counts : this.state.counts;
        this.set({ rows: appended(this.state.rows, page.sessions), cursor: page.cursor, counts, loaded: true });
      } while (this.state.cursor !== null && this.state.rows.length < wanted);
    });
  }

  /** After a failure: begin again if nothing is there, else look at what is new. */
  retry() {
    if (this.state.loaded) this.take({ changed: new Set(), all: true });
    else this.more();
  }

  /** News: sessions that changed, or that some were missed. */
  take({ changed: ids, all }) {
    for (const id of ids) this.news.ids.add(id);
    this.news.all ||= all;
    this.look();
  }

  look() {
    if (this.busy || this.timer !== null || !this.state.loaded || !(this.news.all || this.news.ids.size)) return;
    this.run(() => (this.news.all ? this.renew() : this.update()), { quiet: true });
  }

  async renew() {
    this.news = { ids: new Set(), all: false };
    const limit = Math.max(FIRST, Math.min(this.state.rows.length, RENEWED));
    const page = await this.read(this.filter, { limit, counts: true });
    const { rows, rest } = renewed(this.state.rows, page.sessions, { whole: page.cursor === null });
    this.set({ rows, counts: page.counts, cursor: rest ? this.state.cursor : page.cursor });
  }

  async update() {
    const [ids, rest] = portion([...this.news.ids]);
    this.news.ids = new Set(rest);
    const [page, counts] = await Promise.all([
      this.read({ ...this.filter, session_ids: ids }, { limit: ids.length }),
      this.read(this.filter, { limit: 1, counts: true, include: "counts" }),
    ]);
    const whole = this.state.cursor === null;
    this.set({ rows: changed(this.state.rows, ids, page.sessions, { order: this.order, whole }), counts: counts.counts });
  }

  /** Do one thing, then go on with the news after a pause. */
  async run(work, { quiet = false } = {}) {
    this.busy = true;
    if (!quiet) this.set({ loading: true });
    try {
      await work();
      this.set({ loading: false, error: null });
    } catch (error) {
      if (this.control.signal.aborted) return;
      // A cursor whose session was deleted since: begin again instead of stopping here.
      if (error.param === "cursor" && this.state.loaded) this.set({ rows: [], cursor: null, loaded: false });
      this.set({ loading: false, error });
    }
    this.busy = false;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.look();
    }, PAUSE_MS);
  }

  read(filter, { limit, cursor = null, counts = false, include = counts ? "summary,counts" : "summary" }) {
    const query = { filter: JSON.stringify(filter), order: this.order, include, limit, cursor };
    return get("/rl/sessions", query, { signal: this.control.signal });
  }

  set(change) {
    if (this.control.signal.aborted) return;
    this.state = { ...this.state, ...change };
    this.show(this.state);
  }
}
