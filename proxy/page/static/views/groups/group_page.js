// One group: how its scores and returns are distributed, and its sessions side by side.
import { Status } from "../../lib/badge.js";
import { post } from "../../lib/api.js";
import { Age } from "../../lib/clock.js";
import { compact, duration, number, plural } from "../../lib/format.js";
import { html, useMemo, useState } from "../../lib/html.js";
import { Empty, Failure, Waiting } from "../../lib/notice.js";
import { whyReturnsDiffer } from "../../lib/returns_why.js";
import { link, replace } from "../../lib/route.js";
import { Short } from "../../lib/text.js";
import { useTitle } from "../../lib/title.js";
import { VirtualTable } from "../../lib/virtual_table.js";
import { Reward, SessionLink, SessionStatus } from "../sessions/columns.js";
import { lastedS } from "../sessions/order.js";
import { aligned, counted, versionsText } from "../sessions/words.js";
import { CompareSessions } from "./compare_sessions.js";
import { Histogram, Sparkline } from "./charts.js";
import { rangeOf, share, spread } from "./distribution.js";
import { MOST, useGroup } from "./group_sessions.js";
import { sorted } from "./sorting.js";

const keyOf = (row) => row.session_id;
const ORDERS = [["score", "best first"], ["start", "oldest first"], ["turns", "longest first"]];

export function GroupPage({ name, query }) {
  useTitle(`Group ${name}`);
  const group = useGroup(name);
  const { rows } = group;
  const facts = useMemo(() => factsOf(rows), [rows]);
  const order = query.order ?? "score";
  const shown = useMemo(() => sorted(rows, order), [rows, order]);
  const columns = useMemo(() => columnsFor(facts), [facts]);
  return html`<section class="group">
    <div class="bar">
      <h1>Group <${Short} text=${name} length=${60} /></h1>
      <${Facts} rows=${rows} entry=${group.entry} />
    </div>
    ${group.error && html`<${Failure} what="Loading the group" error=${group.error} retry=${group.reload} />`}
    ${rows.length === 0
      ? html`<${Nothing} group=${group} />`
      : html`<div class="group-charts">
            <${Histogram} title="Rewards" hint="the score of each session" unit="session" values=${facts.scores} found=${facts.score} />
            <${Histogram} title="Returns" hint="of each turn of rewarded sessions" unit="turn" values=${facts.returns} found=${facts.return} />
          </div>
          <${Differences} rows=${rows} />
          <div class="bar">
            <h2>Sessions side by side</h2>
            <label class="sessions-field">Order
              <select value=${order} onChange=${(event) => replace("groups", name, { ...query, order: event.target.value })}>
                ${ORDERS.map(([key, word]) => html`<option key=${key} value=${key} selected=${key === order}>${word}</option>`)}
              </select>
            </label>
            <${CompareSessions} rows=${rows} />
            <${SharedTokens} key=${name} name=${name} />
            <a class="push small" href=${link("sessions", "", { group: name })}>In the list of sessions</a>
          </div>
          ${!group.whole && html`<p class="quiet small" role="status">${group.loading ? "Loading more sessions…" : `The first ${number(MOST)} sessions; the list of sessions has all.`}</p>`}
          <${VirtualTable} class="group-table" label="Sessions of the group" columns=${columns} rows=${shown} keyOf=${keyOf} total=${group.entry?.sessions} />`}
  </section>`;
}

/** How many tokens layout forest saves in this group: counted when asked, because it reads all tokens. */
function SharedTokens({ name }) {
  const [found, show] = useState(null);
  const count = async () => {
    show({ counting: true });
    const body = { filter: { group_id: name, validation: "include" }, layout: "forest", outline: true };
    try {
      const answer = await post("/trajectories/export", body);
      show((await answer.json()).forest);
    } catch (error) {
      show({ error });
    }
  };
  if (found?.error) return html`<${Failure} what="Counting shared tokens" error=${found.error} retry=${count} />`;
  if (found?.rows === undefined)
    return html`<button class="small" disabled=${found?.counting} onClick=${count}>Count shared tokens</button>`;
  const { rows, row_tokens: all, tokens, merged_tokens: merged } = found;
  const percent = all ? Math.round((100 * merged) / all) : 0;
  return html`<span class="quiet small" role="status" title="Layout forest has the tokens that samples of a group begin with once">
    ${plural(rows, "sample")} of ${number(all)} tokens; ${number(tokens)} with shared tokens once (${percent} % fewer)</span>`;
}

function Nothing({ group }) {
  if (group.error) return null;
  if (!group.loaded) return html`<${Waiting} text="Loading the group…" />`;
  return html`<${Empty} title="There is no such group"><a href=${link("groups")}>All groups</a><//>`;
}

/** The numbers of the group in a line. */
function Facts({ rows, entry }) {
  if (!entry) return null;
  const tasks = entry.task_ids.filter((task) => task !== "");
  return html`<span class="quiet">${plural(entry.sessions, "session")}${entry.group_size !== null && ` of ${number(entry.group_size)}`}</span>
    ${Object.entries(entry.by_status).map(([status, count]) => count > 0 && html`<${Status} key=${status} status=${status} text=${`${number(count)} ${status === "active" ? "open" : status}`} />`)}
    <span class="quiet">${number(entry.rewarded)} rewarded</span>
    ${tasks.length > 0 && html`<span class="quiet">task <a href=${link("sessions", "", { task: tasks[0] })}><${Short} text=${tasks[0]} length=${30} /></a>${tasks.length > 1 && ` and ${tasks.length - 1} more`}</span>`}
    <span class="quiet">${plural(entry.turns, "turn")}, ${compact(entry.output_tokens)} sampled tokens</span>
    <span class="push quiet small">started <${Age} at=${entry.created_at} /> ago</span>`;
}

/** Why figures on this page differ: returns from rewards, and sessions that no figure counts. */
function Differences({ rows }) {
  const reasons = rows.filter(({ withdrawn }) => !withdrawn).map((row) => whyReturnsDiffer({ ...row, ...row.summary })).filter(Boolean);
  const withdrawn = rows.filter((row) => row.withdrawn).length;
  return html`${reasons.length > 0 && html`<p class="small quiet">Rewards and returns differ in ${plural(reasons.length, "session")}. ${reasons[0]}</p>`}
    ${withdrawn > 0 && html`<p class="small quiet">${plural(withdrawn, "withdrawn session is", "withdrawn sessions are")} in the list, and in no other figure.</p>`}`;
}

/** What the rows are compared by. Withdrawn sessions do not count, as in the server's figures of the group. */
function factsOf(rows) {
  const rewarded = rows.filter(({ withdrawn, summary }) => !withdrawn && summary.score !== null);
  const scores = rewarded.map(({ summary }) => summary.score);
  const returns = rewarded.flatMap(({ summary }) => summary.returns.values);
  const [score, found] = [spread(scores), spread(returns)];
  return { scores, returns, score, return: found, scoreRange: withZero(rangeOf(scores)), returnRange: rangeOf(returns) ?? [0, 0], longest: Math.max(1, ...rows.map(({ summary }) => summary.turns)) };
}

/** Bars begin at zero. */
const withZero = (range) => (range === null ? [0, 1] : [Math.min(0, range[0]), Math.max(0, range[1])]);

const columnsFor = (facts) => [
  { name: "session", title: "Session", width: "20%", card: "title", cell: (row) => html`<${SessionLink} row=${row} length=${30} />` },
  { name: "status", title: "Status", width: "13%", card: "lead", cell: (row) => html`<${SessionStatus} row=${row} />` },
  { name: "reward", title: "Reward", number: true, width: "6%", card: "lead", cell: (row) => html`<${Reward} row=${row} />` },
  { name: "bar", title: html`<span class="visually-hidden">Reward as a bar</span>`, width: "10%", card: "none", cell: ({ summary: { score } }) => score !== null && html`<${Bar} value=${score} range=${facts.scoreRange} />` },
  { name: "difference", title: "To mean", hint: "Its reward less the mean of the group", number: true, width: "7%", cell: (row) => difference(countedScore(row), facts.score) },
  { name: "advantage", title: "In std", hint: "The same in standard deviations of the group: its advantage under GRPO", number: true, width: "6%", cell: (row) => advantage(countedScore(row), facts.score) },
  { name: "returns", title: "Returns", hint: "The returns of its turns, in their order", width: "11%", card: "note", cell: ({ summary }) => html`<${Sparkline} label="Returns" values=${summary.score === null ? [] : summary.returns.values} range=${facts.returnRange} />` },
  { name: "turns", title: "Turns", number: true, width: "5%", cell: ({ summary }) => number(summary.turns) },
  { name: "forks", title: "Forks", number: true, width: "5%", cell: ({ summary }) => html`<span class=${summary.forks ? "" : "quiet"} title=${summary.forks ? counted(summary.reasons) : undefined}>${summary.forks ? number(summary.forks) : "–"}</span>` },
  { name: "output", title: "Output", hint: "Sampled tokens", number: true, width: "6%", cell: ({ summary }) => html`<span title=${plural(summary.output_tokens, "token")}>${compact(summary.output_tokens)}</span>` },
  { name: "version", title: "Version", number: true, width: "5%", cell: versionsText },
  { name: "lasted", title: "Lasted", hint: "From its start to its end, or to the last change", number: true, width: "7%", cell: (row) => duration(lastedS(row)) },
];

function Bar({ value, range }) {
  const [zero, end] = [share(0, range), share(value, range)];
  const style = { left: `${Math.min(zero, end) * 100}%`, width: `max(2px, ${Math.abs(end - zero) * 100}%)` };
  return html`<span class="group-bar" aria-hidden="true"><span class=${value < 0 ? "group-below" : ""} style=${style}></span></span>`;
}

const countedScore = ({ withdrawn, summary: { score } }) => (withdrawn ? null : score);
const signed = (value) => `${value > 0 ? "+" : ""}${aligned(value)}`;
const difference = (score, found) => (score === null || found.count < 2 ? html`<span class="quiet">–</span>` : signed(score - found.mean));
const advantage = (score, found) =>
  score === null || found.std === null ? html`<span class="quiet">–</span>` : signed((score - found.mean) / (found.std + 1e-6));
