// The list of sessions: live, filtered by what the address says, of any length.
import { number } from "../../lib/format.js";
import { html, useMemo } from "../../lib/html.js";
import { Empty, Failure, Waiting } from "../../lib/notice.js";
import { link, replace } from "../../lib/route.js";
import { useTitle } from "../../lib/title.js";
import { VirtualTable } from "../../lib/virtual_table.js";
import { COLUMNS } from "./columns.js";
import { FilterBar } from "./filter_bar.js";
import { filterCount, filterOf, orderOf, totalOf, withoutFilters } from "./filters.js";
import { useSessionList } from "./session_list.js";

const keyOf = (row) => row.session_id;

export function SessionsView({ query }) {
  useTitle("Sessions");
  const filter = useMemo(() => filterOf(query), [query]);
  const list = useSessionList(filter, orderOf(query));
  const total = totalOf(list.counts, query.status) ?? (list.whole ? list.rows.length : null);
  return html`<section class="sessions">
    <h1 class="visually-hidden">Sessions</h1>
    <${FilterBar} query=${query} counts=${list.counts} change=${(names) => replace("sessions", "", { ...query, ...names })}
      clear=${() => replace("sessions", "", withoutFilters(query))}>
      <${Progress} list=${list} total=${total} />
    <//>
    ${list.error && html`<${Failure} what="Loading the sessions" error=${list.error} retry=${list.reload} />`}
    <${Rows} list=${list} total=${total} filtered=${filterCount(query) > 0} />
  </section>`;
}

function Rows({ list, total, filtered }) {
  if (list.rows.length > 0) {
    return html`<${VirtualTable} class="sessions-table" label="Sessions" columns=${COLUMNS} rows=${list.rows} keyOf=${keyOf} total=${total} onEnd=${list.more} />`;
  }
  if (list.error && !list.loaded) return null;
  if (!list.whole) return html`<${Waiting} text=${list.loaded ? "Looking through the sessions…" : "Loading the sessions…"} />`;
  if (filtered) return html`<${Empty} title="No session matches"><a href=${link("sessions")}>Show all sessions</a><//>`;
  return html`<${Empty} title="No sessions yet">
    Each conversation of an agent with this server is one. <code>tokengrove demo</code> records some.
  <//>`;
}

/** How many sessions match, and how many of them are here. Says it to screen readers when it settles. */
function Progress({ list, total }) {
  const here = list.rows.length;
  const said = list.whole || total !== null ? `${number(total ?? here)} ${(total ?? here) === 1 ? "session" : "sessions"}` : `${number(here)} sessions so far`;
  return html`<span class="push quiet small" role="status">${list.loaded && !(list.loading && here === 0) ? said : ""}</span>`;
}
