// What the server does: the numbers of now, the last hour in charts, and what happened by kind. Live while it is shown.
import { get } from "../../lib/api.js";
import { listen } from "../../lib/events.js";
import { compact, duration, reward, when } from "../../lib/format.js";
import { html, useCallback, useEffect, useMemo, useRef, useState } from "../../lib/html.js";
import { useLoad } from "../../lib/load.js";
import { Failure, Waiting } from "../../lib/notice.js";
import { replace } from "../../lib/route.js";
import { useTitle } from "../../lib/title.js";
import { BarList } from "./bar_list.js";
import { Chart } from "./chart.js";
import { Engine } from "./engine.js";
import { bars, joined, lately, withAsked } from "./series.js";
import { Tiles } from "./tiles.js";

const SPANS = { "5m": [300, "5 min"], "15m": [900, "15 min"], "1h": [3600, "1 h"] };
const NO_FORKS = ["first", "continued", "new_root"];

/** `query.span`: 5m, 15m or 1h (default). `query.as`: "tables" shows the numbers of the charts. */
export function OverviewView({ query }) {
  useTitle("Overview");
  const { now, history, error, reload } = useStatisticsAndHistory();
  const span = Object.hasOwn(SPANS, query.span) ? query.span : "1h";
  const asTable = query.as === "tables";
  const change = (changes) => replace("overview", "", { ...query, ...changes });
  return html`<div class="overview">
    <div class="bar overview-bar-above">
      <h1>Overview</h1>
      ${now && html`<span class="quiet small" title=${`version ${now.version}`}>${now.processes > 1 ? `${now.processes} workers` : ""}</span>`}
      <div class="bar push" role="group" aria-label="What the charts show">
        ${Object.entries(SPANS).map(
          ([name, [, text]]) =>
            html`<button key=${name} type="button" aria-pressed=${name === span} onClick=${() => change({ span: name === "1h" ? null : name })}>${text}</button>`,
        )}
        <button type="button" aria-pressed=${asTable} onClick=${() => change({ as: asTable ? null : "tables" })}>Tables</button>
      </div>
    </div>
    ${error && html`<${Failure} what="Loading the statistics" error=${error} retry=${reload} />`}
    ${now ? html`<${Board} now=${now} history=${history} seconds=${SPANS[span][0]} asTable=${asTable} />` : !error && html`<${Waiting} />`}
  </div>`;
}

/** The newest statistics, with the history of the last hour: asked for once, and again after each new connection. */
function useStatisticsAndHistory() {
  const [said, setSaid] = useState({ now: null, history: null });
  const take = useCallback((now) => setSaid((old) => ({ now, history: joined(old.history, now.history) })), []);
  const { data, error, reload } = useLoad(({ signal }) => get("/rl/statistics", {}, { signal }), [], { keep: true });
  useEffect(() => data && setSaid((old) => withAsked(old, data)), [data]);
  const failed = useRef(false);
  failed.current = error !== null;
  useEffect(() => {
    let first = true;
    return listen({
      statistics: take,
      sessions: ({ all }) => {
        if (all && (!first || failed.current)) reload(); // after a break, or the server was not there at first
        first = false;
      },
    });
  }, []);
  return { ...said, error, reload };
}

function Board({ now, history, seconds, asTable }) {
  const meanings = useLoad(({ signal }) => get("/rl/reasons", {}, { signal }), []).data?.reason ?? {};
  const last = history.at.at(-1);
  const drawn = (...names) => useMemo(() => lately(history, names, seconds, last ?? 0), [last, history.at[0], seconds]);
  const common = { asTable, x: clock, tick: Math.min(seconds, last - history.at[0]) > 900 ? minute : clock, empty: "Nothing yet: a sample is taken every five seconds." };
  return html`
    <${Tiles} of=${now} />
    <div class="overview-grid">
      <${Chart} ...${common} title="Turns" unit="/ s" format=${compact} data=${drawn("turns_per_s", "failed_per_s")}
        series=${[{ label: "complete", colour: "--c1" }, { label: "failed", colour: "--c5" }]} />
      <${Chart} ...${common} title="Tokens" unit="/ s" format=${compact} data=${drawn("prompt_tokens_per_s", "cached_tokens_per_s", "output_tokens_per_s")}
        series=${[{ label: "prompt", colour: "--c2" }, { label: "cached", colour: "--c6" }, { label: "output", colour: "--c3" }]} />
      <${Chart} ...${common} title="Time to first token" unit="" format=${duration} least=${0.05} data=${drawn("first_token_p50_s", "first_token_p95_s")}
        series=${[{ label: "p50", colour: "--c1" }, { label: "p95", colour: "--c4" }]} empty="No turn in this time." />
      <${Chart} ...${common} title="Requests" unit="" whole=${true} format=${compact} data=${drawn("in_flight", "waiting")}
        series=${[{ label: "in flight", colour: "--c2" }, { label: "waiting", colour: "--c3" }]} />
      <${Rewards} rewards=${now.rewards} asTable=${asTable} />
      <${BarList} title="Forks" note="by reason, since the start" heading="reason" items=${bars(now.reasons, NO_FORKS)} meanings=${meanings}
        empty="No fork: every turn began a conversation or went on where the last one ended." />
      <${BarList} title="Failures" note="by error code, since the start" heading="code" items=${bars(now.errors)} kind="bad"
        empty="No request was answered with an error." />
      <${Chart} ...${common} title="Events" unit="/ s" format=${compact} data=${drawn("forks_per_s", "errors_per_s", "retries_per_s")}
        series=${[{ label: "forks", colour: "--c4" }, { label: "errors", colour: "--c5" }, { label: "retries", colour: "--c8" }]} />
      <${BarList} title="Claim backlog" note=${oldest(now.sessions)} heading="sessions that are" items=${backlog(now.sessions)} kind="plain" meanings=${BACKLOG}
        empty=${now.sessions === null ? "The database does not answer." : "No session is live or waits for a trainer."} />
      <${Engine} of=${now} />
    </div>`;
}

/** The mean reward of the sessions that ended last, by the weights that they began with and over time. */
function Rewards({ rewards, asTable }) {
  const versions = useMemo(() => columns(rewards?.by_version ?? [], "version"), [rewards]);
  const periods = useMemo(() => columns(rewards?.over_time ?? [], "at"), [rewards]);
  const of = whichSessions(rewards);
  const common = { asTable, format: reward, points: true, range: aroundValues, empty: "None of the sessions that ended last has a reward." };
  const series = [{ label: "mean", colour: "--c1" }];
  return html`
    <${Chart} ...${common} title="Mean reward by weights" unit=${of} series=${series} data=${versions} time=${false} x=${String} />
    <${Chart} ...${common} title="Mean reward over time" unit=${of} series=${series} data=${periods} x=${when} tick=${daily(periods[0]) ? day : clock} />`;
}

/** Which sessions the means are of. */
function whichSessions(rewards) {
  if (rewards === null) return "";
  return rewards.unread > 0 ? `reading… ${compact(rewards.unread)} to go` : `last ${compact(rewards.sessions)} ended`;
}

const columns = (entries, x) => [entries.map((entry) => entry[x]), entries.map((entry) => entry.mean)];

/** The time of day of Unix seconds, with and without seconds; and the day. */
const clock = (at) => when(at).slice(11);
const minute = (at) => when(at).slice(11, 16);
const day = (at) => when(at).slice(5, 16);
const daily = (times) => times.at(-1) - times[0] > 86_400;

const BACKLOG = {
  live: "have not ended",
  waiting: "have ended, and no trainer has claimed them",
  leased: "a trainer has claimed them, and has not acknowledged them",
};
const backlog = (sessions) => bars(sessions === null ? {} : { live: sessions.active, waiting: sessions.waiting, leased: sessions.leased });
const oldest = (sessions) => (typeof sessions?.oldest_wait_s === "number" ? `the oldest waits ${duration(sessions.oldest_wait_s)}` : "sessions");

function aroundValues(_, least, most) {
  if (least === null) return [0, 1];
  const room = Math.max((most - least) * 0.15, 0.05);
  return [least - room, most + room];
}
