// The groups, each with the distribution of its rewards, or the one group that the address names.
import { Status } from "../../lib/badge.js";
import { Age } from "../../lib/clock.js";
import { compact, number, plural, reward } from "../../lib/format.js";
import { html, useMemo } from "../../lib/html.js";
import { Empty, Failure, Waiting } from "../../lib/notice.js";
import { link, replace } from "../../lib/route.js";
import { Short } from "../../lib/text.js";
import { useTitle } from "../../lib/title.js";
import { VirtualTable } from "../../lib/virtual_table.js";
import { Draft } from "../sessions/filter_bar.js";
import { aligned } from "../sessions/words.js";
import { SmallHistogram } from "./charts.js";
import { rangeOf } from "./distribution.js";
import { keyOf, useGroupList } from "./group_list.js";
import { GroupPage } from "./group_page.js";

export function GroupsView({ name, query }) {
  return name === "" ? html`<${GroupsList} query=${query} />` : html`<${GroupPage} key=${name} name=${name} query=${query} />`;
}

function GroupsList({ query }) {
  useTitle("Groups");
  const filter = useMemo(() => (query.search ? { search: query.search } : {}), [query.search]);
  const list = useGroupList(filter);
  return html`<section class="groups">
    <form class="bar" role="search" aria-label="Filter the groups" onSubmit=${(event) => event.preventDefault()}>
      <h1>Groups</h1>
      <label class="sessions-field sessions-wide">Search
        <${Draft} type="search" placeholder="Part of a group, task or session" value=${query.search} set=${(search) => replace("groups", "", { ...query, search })} />
      </label>
      <span class="push quiet small" role="status">${list.loaded ? said(list) : ""}</span>
    </form>
    ${list.error && html`<${Failure} what="Loading the groups" error=${list.error} retry=${list.reload} />`}
    <${Rows} list=${list} searched=${Boolean(query.search)} />
  </section>`;
}

const said = ({ rows, whole }) => (whole ? plural(rows.length, "group") : `${plural(rows.length, "group")} so far`);

function Rows({ list, searched }) {
  const range = useMemo(() => rangeOf(list.rows.flatMap(({ min, max }) => (min === null ? [] : [min, max]))), [list.rows]);
  const columns = useMemo(() => columnsFor(range), [range?.[0], range?.[1]]);
  if (list.rows.length > 0) {
    return html`<${VirtualTable} class="groups-table" label="Groups" columns=${columns} rows=${list.rows} keyOf=${keyOf}
      total=${list.whole ? undefined : null} onEnd=${list.more} />`;
  }
  if (list.error && !list.loaded) return null;
  if (!list.whole) return html`<${Waiting} text="Loading the groups…" />`;
  if (searched) return html`<${Empty} title="No group matches"><a href=${link("groups")}>Show all groups</a><//>`;
  return html`<${Empty} title="No groups yet">Sessions that start with the same <code>group_id</code> are a group.<//>`;
}

/** `range`: of all scores that are shown; the small histograms share it. */
const columnsFor = (range) => [
  { name: "group", title: "Group", width: "18%", card: "title", cell: (group) => html`<a href=${link("groups", group.group_id)} data-focus><${Short} text=${group.group_id} length=${28} /></a>` },
  { name: "task", title: "Task", width: "13%", card: "note", cell: (group) => html`<${Tasks} names=${group.task_ids} />` },
  { name: "sessions", title: "Sessions", hint: "Sessions, and how many its claim needs", number: true, width: "8%", cell: sizeText },
  { name: "open", title: "Open", hint: "Sessions that have not ended", width: "7%", card: "lead", cell: ({ by_status: { active } }) => (active ? html`<${Status} status="active" text=${number(active)} title=${`${number(active)} open`} />` : "") },
  { name: "rewarded", title: "Rewarded", hint: "Sessions with a score", number: true, width: "7%", cell: ({ rewarded }) => number(rewarded) },
  { name: "scores", title: range ? html`Scores <span class="quiet">${reward(range[0])} … ${reward(range[1])}</span>` : "Scores", hint: "The scores of its sessions; the line is their mean", width: "13%", card: "none",
    cell: ({ scores, mean }) => html`<${SmallHistogram} label="Scores" values=${scores} mean=${mean} range=${range} />` },
  { name: "mean", title: "Mean", hint: "Mean reward", number: true, width: "6%", card: "lead", cell: ({ mean }) => html`<span class="sessions-score" title=${reward(mean)}>${aligned(mean)}</span>` },
  { name: "std", title: "Std", hint: "Standard deviation, as advantages divide by it. 0: no advantage differs", number: true, width: "6%", cell: (group) => html`<${Std} group=${group} />` },
  { name: "return", title: "Return", hint: "Mean of the returns of all turns", number: true, width: "6%", cell: ({ returns }) => aligned(returns.mean) },
  { name: "turns", title: "Turns", number: true, width: "5%", cell: ({ turns }) => compact(turns) },
  { name: "version", title: "Version", number: true, width: "6%", cell: ({ versions }) => rangeText(versions) },
  { name: "age", title: "Age", hint: "Since its first session started", number: true, width: "5%", cell: (group) => html`<${Age} at=${group.created_at} />` },
];

const sizeText = ({ sessions, group_size: size }) => (size === null ? number(sessions) : `${number(sessions)} of ${number(size)}`);
export const rangeText = (versions) => (versions === null ? "–" : versions[0] === versions[1] ? String(versions[0]) : versions.join("–"));

/** Groups whose scores are all equal teach nothing: this says so in a word. */
function Std({ group: { std, rewarded } }) {
  const same = std === 0 && rewarded > 1;
  return html`<span class=${same ? "warn" : ""} title=${same ? "All scores are equal: no session is better than another" : undefined}>${same ? "equal" : aligned(std)}</span>`;
}

function Tasks({ names }) {
  const [first, ...others] = names.filter((task) => task !== "");
  return first && html`<${Short} text=${first} length=${17} />${others.length > 0 && html` <span class="quiet small">+${others.length}</span>`}`;
}
