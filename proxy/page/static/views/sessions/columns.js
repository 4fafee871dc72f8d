// The columns of the list: one session at a glance.
import { Badge, Status } from "../../lib/badge.js";
import { Age } from "../../lib/clock.js";
import { compact, duration, number, plural, reward, when } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { printable } from "../../lib/printable.js";
import { whyReturnsDiffer } from "../../lib/returns_why.js";
import { link } from "../../lib/route.js";
import { Short } from "../../lib/text.js";
import { lastedS, valueOf } from "./order.js";
import { aligned, counted, versionsText } from "./words.js";

/**
 * The columns of a VirtualTable whose rows are entries of `GET /rl/sessions` with their summaries. `keys`: names of further
 * values that have a column, such as "metadata.step".
 */
export const columnsWith = (keys) => [
  { name: "session", title: "Session", width: "15.5%", card: "title", cell: (row) => html`<${SessionLink} row=${row} length=${30} />` },
  { name: "status", title: "Status", width: "13.5%", card: "lead", cell: (row) => html`<${SessionStatus} row=${row} />` },
  { name: "task", title: "Task", width: "10%", card: "note", cell: ({ task_id: task }) => task && html`<${Only} name="task" text=${task} />` },
  { name: "group", title: "Group", width: "10%", card: "note", cell: ({ group_id: group }) => group && html`<${Only} name="group" text=${group} />` },
  ...keys.map(keyedColumn),
  { name: "turns", title: "Turns", hint: "Complete turns", number: true, width: "5%", sort: "turns", cell: ({ summary }) => html`<${Turns} summary=${summary} />` },
  { name: "lost", title: "Lost", hint: "Calls that failed or were aborted", number: true, width: "5%", sort: "lost", cell: ({ summary }) => html`<${Lost} summary=${summary} />` },
  { name: "forks", title: "Forks", hint: "Turns that went back, by reason in the title", number: true, width: "5%", sort: "forks", cell: ({ summary }) => html`<${Forks} summary=${summary} />` },
  { name: "prompt", title: "Prompt", hint: "Prompt tokens of all complete turns", number: true, width: "6%", sort: "prompt_tokens", cell: ({ summary }) => html`<${Tokens} count=${summary.prompt_tokens} />` },
  { name: "output", title: "Output", hint: "Sampled tokens of all complete turns", number: true, width: "6%", sort: "output_tokens", cell: ({ summary }) => html`<${Tokens} count=${summary.output_tokens} />` },
  { name: "reward", title: "Reward", hint: "The score: what samples of the session are rewarded with", number: true, width: "6.5%", card: "lead", sort: "reward", cell: (row) => html`<${Reward} row=${row} />` },
  { name: "version", title: "Version", hint: "Weight versions that sampled it", number: true, width: "5.5%", cell: (row) => versionsText(row) },
  { name: "lasted", title: "Lasted", hint: "From its start to its end, or to the last change", number: true, width: "7%", sort: "duration", cell: (row) => duration(lastedS(row)) },
  { name: "last", title: "Active", hint: "Since the last turn or change", number: true, width: "5%", cell: ({ summary }) => html`<${Age} at=${summary.last_at} />` },
  { name: "created", title: "Started", hint: "Since the start", number: true, width: "6%", sort: "created", cell: (row) => html`<span title=${when(row.created_at)}><${Age} at=${row.created_at} /></span>` },
];

/** A value of metadata or metrics: the name after the point is its heading. */
const keyedColumn = (name) => ({
  name, title: html`<${Short} text=${name.slice(name.indexOf(".") + 1)} length=${12} />`, hint: printable(name, { line: true }), number: true, width: "6%", sort: name,
  cell: (row) => shown(valueOf(row, name)),
});

function shown(value) {
  if (value === undefined) return html`<span class="quiet">–</span>`;
  return typeof value === "number" ? number(value) : html`<${Short} text=${String(value)} length=${12} />`;
}

/** The id of a session, which leads to it. */
export function SessionLink({ row, length }) {
  return html`<a href=${link("session", row.session_id)} data-focus><${Short} text=${row.session_id} length=${length} /></a>
    ${row.metadata.validate === true && html` <${Badge} text="validation" title="Its metadata says validate: true" />`}`;
}

/** Its status and how it ended, or how many calls run. */
export function SessionStatus({ row }) {
  const { status, outcome, exit_reason: why, summary } = row;
  const told = [outcome && `outcome: ${outcome}`, why && `exit reason: ${printable(why.slice(0, 500))}`].filter(Boolean).join(", ");
  return html`<${Status} status=${status} title=${told || undefined} />
    ${row.withdrawn && html` <${Badge} text="withdrawn" title="No group, claim or export counts it" />`}
    ${outcome && outcome !== "Finished" && html` <${Badge} kind="warn" text=${outcome} title=${told} />`}
    ${summary.running > 0 && html` <${Status} status="running" text=${number(summary.running)} title=${`${plural(summary.running, "call")} running`} />`}`;
}

/** A task or group, which leads to its sessions. */
function Only({ name, text }) {
  return html`<a class="sessions-only" href=${link("sessions", "", { [name]: text })} title=${`${printable(text, { line: true })}: only this ${name}`}>
    <${Short} text=${text} length=${17} />
  </a>`;
}

function Turns({ summary: { turns, purposes, agents } }) {
  const told = [counted(purposes), agents.length && `agents: ${printable(agents.join(", "), { line: true })}`];
  return html`<span title=${told.filter(Boolean).join("; ") || undefined}>${number(turns)}</span>`;
}

function Lost({ summary: { failed, aborted, superseded } }) {
  const lost = failed + aborted;
  const told = counted({ failed, aborted, "replaced by retries": superseded });
  return html`<span class=${lost ? "bad" : "quiet"} title=${told || undefined}>${lost ? `✕ ${number(lost)}` : "–"}</span>`;
}

function Forks({ summary: { forks, reasons } }) {
  return html`<span class=${forks ? "" : "quiet"} title=${forks ? counted(reasons) : undefined}>${forks ? number(forks) : "–"}</span>`;
}

function Tokens({ count }) {
  return html`<span title=${plural(count, "token")}>${compact(count)}</span>`;
}

/** The score of a session. */
export function Reward({ row }) {
  const { score, returns } = row.summary;
  if (score === null) return html`<span class="quiet" title="No reward yet">–</span>`;
  const told = `Reward ${reward(score)}. Returns of its turns: first ${reward(returns.first)}, from ${reward(returns.min)} to ${reward(returns.max)}. ${whyReturnsDiffer({ ...row, ...row.summary }) ?? ""}`.trim();
  return html`<span class="sessions-score" title=${told}>${aligned(score)}</span>`;
}
