// A list that is loaded page by page and kept up to date by news: one request at a time, so that none overtakes another.

const PAUSE_MS = 400; // between two looks at what has changed; the server tells of changes once a second
const FAILED_MS = 5000; // after a failure

/**
 * The base of lists. A list has `more()`, which runs what loads rows, and `renew()` and `update(ids)`, which read what is
 * new; `update` returns the ids that it left for later. `state` goes to `show` whenever `set` changes it.
 */
export class LiveList {
  constructor(state, show) {
    Object.assign(this, { state, show, busy: false, timer: null });
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

  /** Whether rows can be loaded now: nothing else is, and there are more. */
  get ready() {
    return !this.busy && !(this.state.loaded && this.state.cursor === null);
  }

  /** After a failure: begin again if nothing is there, else look at what is new. */
  retry() {
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
    if (this.busy || this.timer !== null || !this.state.loaded || !(all || ids.size)) return;
    this.news = { ids: new Set(), all: false };
    this.run(async () => {
      if (all) await this.renew();
      else for (const id of await this.update([...ids])) this.news.ids.add(id);
    }, { quiet: true });
  }

  /** Do one thing, then go on with the news after a pause. A look at news that failed is made again. */
  async run(work, { quiet = false } = {}) {
    this.busy = true;
    if (!quiet) this.set({ loading: true });
    const error = await work().then(() => null, (reason) => reason);
    this.busy = false;
    if (this.signal.aborted) return;
    if (error?.param === "cursor") {
      // The session that the cursor names was deleted since: begin again instead of stopping here.
      this.set({ rows: [], cursor: null, loaded: false });
      this.more();
      return;
    }
    this.set({ loading: false, error });
    this.news.all ||= quiet && error !== null;
    this.timer = setTimeout(() => {
      this.timer = null;
      this.look();
    }, error === null ? this.pause : FAILED_MS);
  }

  set(change) {
    if (this.signal.aborted) return;
    this.state = { ...this.state, ...change };
    this.show(this.state);
  }
}
