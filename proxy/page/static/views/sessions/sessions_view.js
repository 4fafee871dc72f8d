// The list of sessions: live, filtered and sorted as the address says, of any length.
import { number, plural } from "../../lib/format.js";
import { html, useMemo, useRef } from "../../lib/html.js";
import { Empty, Failure, Notice, Waiting } from "../../lib/notice.js";
import { link, replace } from "../../lib/route.js";
import { useTitle } from "../../lib/title.js";
import { VirtualTable } from "../../lib/virtual_table.js";
import { columnsWith } from "./columns.js";
import { Extremes } from "./extremes.js";
import { FilterBar } from "./filter_bar.js";
import { filterCount, filterOf, firstOf, orderOf, totalOf, withoutFilters } from "./filters.js";
import { FOUND } from "./found.js";
import { clicked, orderFrom } from "./order.js";
import { useSessionList } from "./session_list.js";
import { columnKeys, keysOf } from "./value_keys.js";

const keyOf = (row) => row.session_id;

/** The columns of the list; `found`: with what a search for text found beside the session. */
function columnsOf(keys, found) {
  const columns = columnsWith(keys);
  return found ? [columns[0], FOUND, ...columns.slice(1)] : columns;
}

export function SessionsView({ query }) {
  useTitle("Sessions");
  const filter = useMemo(() => filterOf(query), [query]);
  const order = orderOf(query);
  const list = useSessionList(filter, order);
  const total = totalOf(list.counts, query.status) ?? list.sorted?.sessions ?? (list.whole ? list.rows.length : null);
  const known = useRef([]); // the keys of the rows before, while others are read
  if (list.rows.length > 0) known.current = list.rows;
  const keys = useMemo(() => keysOf(known.current, order), [known.current, order]);
  const texts = useRef(false); // a list that loads does not say it
  texts.current ||= list.unindexed !== undefined || query.text !== undefined;
  const change = (names) => replace("sessions", "", { ...query, ...names });
  return html`<section class="sessions">
    <h1 class="visually-hidden">Sessions</h1>
    <${FilterBar} query=${query} counts=${list.counts} keys=${keys} texts=${texts.current} change=${change} clear=${() => replace("sessions", "", withoutFilters(query))}>
      <${Few} query=${query} /><${Progress} list=${list} total=${total} first=${firstOf(query)} unindexed=${filter.text ? list.unindexed : 0} />
    <//>
    ${list.error && html`<${Failure} what="Loading the sessions" error=${list.error} retry=${list.reload} />`}
    ${list.sorted && !list.sorted.whole && html`<${Notice} kind="warn" title="Older sessions are not in this list." text=${`Of so many, the newest ${number(list.sorted.sessions)} are sorted. A filter that selects fewer sorts them all.`} />`}
    <${Rows} list=${list} total=${total} query=${query} keys=${keys} change=${change} />
  </section>`;
}

function Rows({ list, total, query, keys, change }) {
  const [order, first] = [orderOf(query), firstOf(query)];
  const found = Boolean(query.text);
  const columns = useMemo(() => columnsOf(columnKeys(keys, order), found), [keys, order, found]);
  const sorting = { ...orderFrom(order), by: (name) => change({ order: clicked(order, name), first: null }) };
  const waits = !list.whole && !list.error;
  if (list.rows.length > 0 || waits) { // the headings stay while other rows are read: one of them may have the focus
    const rows = first === null ? list.rows : list.rows.slice(0, first);
    return html`<${VirtualTable} class="sessions-table" label="Sessions" columns=${columns} rows=${rows} keyOf=${keyOf}
      total=${first === null ? total : rows.length} onEnd=${first === null ? list.more : undefined} sorting=${sorting}>
      ${rows.length === 0 && html`<${Waiting} text=${list.loaded ? "Looking through the sessions…" : "Loading the sessions…"} />`}
    <//>`;
  }
  if (list.error) return null;
  if (filterCount(query) > 0) return html`<${Empty} title="No session matches"><a href=${link("sessions")}>Show all sessions</a><//>`;
  return html`<${Empty} title="No sessions yet">
    Each conversation of an agent with this server is one. <code>tokengrove demo</code> records some.
  <//>`;
}

/** The ten sessions with the lowest or the highest reward of those that the filters select, or all again. */
function Few({ query }) {
  const first = firstOf(query);
  if (first !== null) return html`<span class="small">the first ${number(first)} · <a href=${link("sessions", "", { ...query, first: null })}>show all</a></span>`;
  return html`<span class="small">reward: <${Extremes} query=${query} /></span>`;
}

/**
 * How many sessions match, how many of them are here, and how many a search for text does not know yet. Says it to screen
 * readers when it settles.
 */
function Progress({ list, total, first, unindexed }) {
  const here = list.rows.length;
  const known = list.whole || total !== null;
  const shown = first === null ? "" : `${number(Math.min(first, here))} of `;
  const said = known ? `${shown}${plural(total ?? here, "session")}` : `${number(here)} sessions so far`;
  return html`<span class="push quiet small" role="status">${list.loaded && !(list.loading && here === 0) ? said + (unindexed > 0 ? `; ${number(unindexed)} not indexed yet` : "") : ""}</span>`;
}
