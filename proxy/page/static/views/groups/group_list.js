// The groups that a filter selects: loaded page by page, and read again when sessions change.
import { get } from "../../lib/api.js";
import { LiveList } from "../../lib/live_list.js";
import { useLiveList } from "../../lib/use_live_list.js";
import { appended, gathered, renewed } from "../sessions/rows.js";

const PAGE = 50;
const PAUSE_MS = 2000; // each look reads all groups that are shown
const RENEWED = 200; // the most that a page of the server has

export const keyOf = (group) => group.group_id;

/** The state of the list (lib/use_live_list.js) of a filter of `GET /rl/groups`. */
export function useGroupList(filter) {
  return useLiveList(JSON.stringify(filter), (state, show) => new GroupList(filter, state, show));
}

class GroupList extends LiveList {
  constructor(filter, state, show) {
    super(state, show);
    this.filter = filter;
    this.pause = PAUSE_MS;
  }

  more() {
    if (!this.mayLoad()) return;
    this.run(async () => {
      const wanted = this.state.rows.length + PAGE;
      do {
        const page = await this.read(wanted - this.state.rows.length, this.state.cursor);
        this.set({ rows: appended(this.state.rows, page.groups, keyOf), cursor: page.cursor, loaded: true });
      } while (this.state.cursor !== null && this.state.rows.length < wanted);
    });
  }

  async renew() {
    const wanted = Math.max(PAGE, Math.min(this.state.rows.length, RENEWED));
    const page = await gathered(wanted, async (limit, cursor) => {
      const { groups, ...more } = await this.read(limit, cursor);
      return { rows: groups, ...more };
    });
    const { rows, rest } = renewed(this.state.rows, page.rows, { whole: page.cursor === null, keyOf });
    this.set({ rows, cursor: rest ? this.state.cursor : page.cursor });
  }

  /** The server does not say which groups the changed sessions are of. */
  async update() {
    await this.renew();
    return [];
  }

  read(limit, cursor) {
    return get("/rl/groups", { filter: JSON.stringify(this.filter), limit, cursor }, { signal: this.signal });
  }
}
