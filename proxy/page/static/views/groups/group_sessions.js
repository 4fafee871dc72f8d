// One group with its sessions: read again when a session of it changes, or comes to it.
import { get } from "../../lib/api.js";
import { LiveList } from "../../lib/live_list.js";
import { useLiveList } from "../../lib/use_live_list.js";
import { appended } from "../sessions/rows.js";

const PAGE = 200;

/** The sessions that are shown at most; the server judges a group by as many. */
export const MOST = 1000;

/** The state (lib/use_live_list.js) of a group: `rows` are its sessions with their returns, `entry` that of `GET /rl/groups`, or null. */
export function useGroup(name) {
  return useLiveList(JSON.stringify(name), (state, show) => new Group(name, state, show));
}

class Group extends LiveList {
  constructor(name, state, show) {
    super({ ...state, entry: null }, show);
    this.filter = { group_id: name };
  }

  more() {
    if (!this.mayLoad() || this.state.loaded) return;
    this.run(() => this.load((rows, cursor) => this.set({ rows, cursor, loaded: true })));
  }

  /** Look whether anything of the group is new: most changes are of other sessions. */
  async renew() {
    const entry = await this.readEntry();
    if (JSON.stringify(entry) === JSON.stringify(this.state.entry)) return;
    let read;
    await this.load((rows, cursor) => (read = { rows, cursor })); // the old rows stay until all are there
    this.set(read);
  }

  async update() {
    await this.renew();
    return [];
  }

  /** Read the entry and the sessions, page by page; `take` gets all rows so far and the cursor. */
  async load(take) {
    this.set({ entry: await this.readEntry() });
    let [rows, cursor] = [[], null];
    do {
      const page = await this.read("/rl/sessions", { include: "returns", limit: Math.min(PAGE, MOST - rows.length), cursor });
      [rows, cursor] = [appended(rows, page.sessions), page.cursor];
      take(rows, cursor);
    } while (cursor !== null && rows.length < MOST);
  }

  async readEntry() {
    const { groups } = await this.read("/rl/groups", { limit: 1 });
    return groups[0] ?? null;
  }

  read(path, query) {
    return get(path, { filter: JSON.stringify(this.filter), ...query }, { signal: this.signal });
  }
}
