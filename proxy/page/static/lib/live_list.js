// A list that is loaded page by page and kept up to date by news: one request at a time, so that none overtakes another.

const PAUSE_MS = 400; // between two looks at what has changed; the server tells of changes once a second
const SHARE = 4; // a look is followed by a pause of so many times its length: a server that is slow has other work
const FAILED_MS = 5000; // after a failure

/**
 * The base of lists. A list has `more()`, which runs what loads rows, and `renew()` and `update(ids)`, which read what is
 * new; `update` returns the ids that it left for later. `state` goes to `show` whenever `set` changes it.
 */
export class LiveList {
  constructor(state, show) {
    Object.assign(this, { state, show, busy: false, wanted: false, timer: null });
    this.control = new AbortController();
    this.pause = PAUSE_MS;
    this.news = { ids: new Set(), all: false };
  }

  get signal() {
    return this.control.signal;
  }

  close() {
    this.control.abort();
    clearTimeout(this.timer);
  }

  /** For `more`: whether rows can be loaded now. While something else is read it says no, and `more` is called after that. */
  mayLoad() {
    const more = !this.state.loaded || this.state.cursor !== null;
    this.wanted = more && this.busy;
    return more && !this.busy;
  }

  /** After a failure: begin again if nothing is there, else look at what is new. */
  retry() {
    this.rest(null);
    if (this.state.loaded) this.take({ changed: [], all: true });
    else this.more();
  }

  /** News: sessions that changed, or that some were missed. */
  take({ changed, all }) {
    for (const id of changed) this.news.ids.add(id);
    this.news.all ||= all;
    this.look();
  }

  look() {
    const { ids, all } = this.news;
    if (this.busy || this.timer !== null || !this.state.loaded || !(all || ids.size) || this.signal.aborted) return;
    this.news = { ids: new Set(), all: false };
    this.run(async () => {
      if (all) await this.renew();
      else for (const id of await this.update([...ids])) this.news.ids.add(id);
    }, { quiet: true });
  }

  /** Do one thing, then go on with the news after a pause. A look at news that failed is made again. */
  async run(work, { quiet = false } = {}) {
    const begun = performance.now();
    this.busy = true;
    if (!quiet) this.set({ loading: true });
    const error = await work().then(() => null, (reason) => reason);
    this.busy = false;
    if (this.signal.aborted) return;
    // The session that a cursor names may have been deleted since: then begin again instead of stopping here.
    const lost = error?.param === "cursor";
    this.set(lost ? { rows: [], cursor: null, loaded: false } : { loading: false, error });
    this.news.all ||= quiet && error !== null;
    this.rest(error === null ? Math.max(this.pause, SHARE * (performance.now() - begun)) : FAILED_MS);
    if (lost || (this.wanted && error === null)) this.more();
  }

  /** Look at the news in `ms` milliseconds, and not before; null: whenever there are some. */
  rest(ms) {
    clearTimeout(this.timer);
    this.timer = ms === null ? null : setTimeout(() => {
      this.timer = null;
      this.look();
    }, ms);
  }

  set(change) {
    if (this.signal.aborted) return;
    this.state = { ...this.state, ...change };
    this.show(this.state);
  }
}
