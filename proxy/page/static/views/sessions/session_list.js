// The sessions that a filter selects: loaded page by page, and kept up to date while they are looked at.
import { get } from "../../lib/api.js";
import { LiveList } from "../../lib/live_list.js";
import { useLiveList } from "../../lib/use_live_list.js";
import { isByValue, NEWEST } from "./order.js";
import { appended, changed, gathered, portion, renewed } from "./rows.js";

const FIRST = 100; // sessions of the first page: what is seen, and some more
const [NEXT, MOST] = [400, 1000]; // the next pages are as long as the list, within these
const RENEWED = 500; // rows that are read again when news were missed

/**
 * The state of the list (lib/use_live_list.js) of a filter (an object) and an order. `counts`: by status, or null. `sorted`:
 * with an order by a value, {sessions, whole}: how many sessions were put in order, and whether the filter selects no more. `unindexed`: of the API.
 */
export function useSessionList(filter, order) {
  return useLiveList(JSON.stringify([filter, order]), (state, show) => new SessionList(filter, order, state, show));
}

class SessionList extends LiveList {
  constructor(filter, order, state, show) {
    super(state, show);
    Object.assign(this, { filter, order });
  }

  /** Load the next rows, as many as a page has: a page of the server may be short, or empty. */
  more() {
    if (!this.mayLoad()) return;
    this.run(async () => {
      const here = this.state.rows.length;
      const wanted = here + (this.state.loaded ? Math.min(MOST, Math.max(NEXT, here)) : FIRST);
      do {
        const first = !this.state.loaded;
        const limit = wanted - this.state.rows.length;
        const page = await this.read(this.filter, { limit, cursor: this.state.cursor, include: first ? "summary,counts" : "summary" });
        const { counts, unindexed } = first ? page : this.state;
        this.set({ rows: appended(this.state.rows, page.sessions), cursor: page.cursor, counts, unindexed, sorted: page.sorted, loaded: true });
      } while (this.state.cursor !== null && this.state.rows.length < wanted);
    });
  }

  async renew() {
    const wanted = Math.max(FIRST, Math.min(this.state.rows.length, RENEWED));
    const page = await gathered(wanted, async (limit, cursor) => {
      const { sessions, ...more } = await this.read(this.filter, { limit, cursor, include: cursor === null ? "summary,counts" : "summary" });
      return { rows: sessions, ...more };
    });
    const { rows, rest } = renewed(this.state.rows, page.rows, { whole: page.cursor === null });
    const { counts, unindexed, sorted } = page.first;
    this.set({ rows, counts, unindexed, sorted, cursor: rest ? this.state.cursor : page.cursor });
  }

  async update(all) {
    const [ids, rest] = portion(all);
    const [page, { counts, unindexed }] = await Promise.all([
      this.read({ ...this.filter, session_ids: ids }, { limit: ids.length, include: "summary" }),
      this.read(this.filter, { limit: 1, include: "counts", order: NEWEST }),
    ]);
    const whole = this.state.cursor === null;
    this.set({ rows: changed(this.state.rows, ids, page.sessions, { order: this.order, whole }), counts, unindexed });
    return rest;
  }

  read(filter, { limit, cursor, include, order = this.order }) {
    const partial = isByValue(order) || undefined; // of too many sessions the newest are better than none
    const parts = filter.text ? `${include},matches` : include;
    const query = { filter: JSON.stringify(filter), order, partial, include: parts, limit, cursor };
    return get("/rl/sessions", query, { signal: this.signal });
  }
}
