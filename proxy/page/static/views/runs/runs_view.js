// Training runs beside each other, by step: reward, length, forks, failures, and how far trainer and sampler are apart.
import { get } from "../../lib/api.js";
import { compact, number, plural, reward } from "../../lib/format.js";
import { html, useEffect, useMemo, useState } from "../../lib/html.js";
import { Empty, Failure, Waiting } from "../../lib/notice.js";
import { link, replace } from "../../lib/route.js";
import { Short } from "../../lib/text.js";
import { useTitle } from "../../lib/title.js";
import { Chart } from "../overview/chart.js";
import { Extremes } from "../sessions/extremes.js";
import { kl, ratio } from "../training/training_words.js";
import { MOST_RUNS, added, besideEachOther, chosenRuns, runsOf, sessionsOf, stepsOf } from "./runs_model.js";

const COLOURS = ["--c1", "--c3", "--c2"];

/** `query.runs`: the runs that are shown; `query.run`, `query.step`: keys of metadata; `query.as`: "tables"; `query.at`: a step. */
export function RunsView({ query }) {
  useTitle("Runs");
  const keys = { run: query.run || undefined, step: query.step || undefined };
  const { sums, error, loading, reload } = useRuns(keys);
  const runs = useMemo(() => runsOf(sums), [sums]);
  return html`<div class="overview">
    <div class="bar overview-bar-above"><h1>Runs</h1>
      <span class="quiet small" role="status">${loading ? "reading…" : plural(runs.length, "run")}</span>
      <${Keys} query=${query} />
    </div>
    ${error && html`<${Failure} what="Loading the runs" error=${error} retry=${reload} />`}
    ${runs.length > 0 ? html`<${Beside} sums=${sums} runs=${runs} query=${query} />` : loading ? html`<${Waiting} />` : !error && html`<${None} />`}
  </div>`;
}

const change = (query, more) => replace("runs", "", { ...query, ...more });

const None = () => html`<${Empty} title="No runs">Sessions that start with <code>metadata: {"experiment": "a", "step": 3}</code> are of
  step 3 of the run a. Other keys can be chosen above.<//>`;

/** All pages, added up; what was read so far is shown while the rest is on its way. */
function useRuns({ run, step }) {
  const [again, setAgain] = useState(0);
  const [state, setState] = useState({ sums: new Map(), error: null, loading: true });
  useEffect(() => {
    const control = new AbortController();
    const read = async () => {
      let [sums, cursor] = [new Map(), null];
      setState({ sums, error: null, loading: true });
      do {
        const asked = Object.fromEntries(Object.entries({ run, step, cursor }).filter(([, value]) => value));
        const page = await get("rl/runs", asked, { signal: control.signal });
        sums = added(sums, page.runs);
        cursor = page.cursor;
        const whole = cursor === null;
        if (!control.signal.aborted) setState({ sums, error: null, loading: !whole });
      } while (cursor !== null);
    };
    read().catch((error) => control.signal.aborted || setState((old) => ({ ...old, error, loading: false })));
    return () => control.abort();
  }, [run, step, again]);
  return { ...state, reload: () => setAgain((count) => count + 1) };
}

function Keys({ query }) {
  const set = (name) => ({ target: { value } }) => change(query, { [name]: value, runs: null });
  return html`<div class="bar push">
    <label title="The key of metadata that names the run">Run <input size="12" placeholder="experiment" value=${query.run ?? ""} onChange=${set("run")} /></label>
    <label title="The key of metadata that has the step">Step <input size="8" placeholder="step" value=${query.step ?? ""} onChange=${set("step")} /></label>
    <button type="button" aria-pressed=${query.as === "tables"} onClick=${() => change(query, { as: query.as === "tables" ? null : "tables" })}>Tables</button>
  </div>`;
}

function Beside({ sums, runs, query }) {
  const chosen = chosenRuns(runs, query.runs);
  const toggle = (run) => {
    const next = chosen.includes(run) ? chosen.filter((each) => each !== run) : [...chosen.slice(1 - MOST_RUNS), run];
    change(query, { runs: next.length ? next.map(encodeURIComponent).join(",") : null });
  };
  const series = chosen.map((run, at) => ({ label: run, colour: COLOURS[at] }));
  const common = { series, asTable: query.as === "tables", time: false, points: true, heading: "step", x: (at) => `step ${at}`, tick: String, save: true };
  const chart = (title, figure, format, more = {}) =>
    html`<${Chart} ...${common} key=${title} title=${title} unit="by step" format=${format} data=${besideEachOther(sums, chosen, figure)} empty="No values." ...${more} />`;
  return html`
    <fieldset class="runs-chosen bar"><legend class="visually-hidden">Runs that are shown, at most ${MOST_RUNS}</legend>
      ${runs.map(({ run, sessions, steps }) => html`<label key=${run} title=${`${plural(steps, "step")}, ${plural(sessions, "session")}`}>
        <input type="checkbox" checked=${chosen.includes(run)} onChange=${() => toggle(run)} /> ${run}</label>`)}
    </fieldset>
    <div class="overview-grid">
      ${chart("Mean reward", "mean_score", reward)}
      ${chart("Output tokens a session", "mean_output_tokens", compact)}
      ${chart("Turns a session", "mean_turns", reward)}
      ${chart("Forks a session", "forks", reward)}
      ${chart("Failures a session", "failed", reward)}
      ${chart("Sessions", "sessions", compact, { whole: true })}
      ${chart("KL of trainer and sampler", "kl", kl, { least: 1e-4, empty: "The trainer told no logprobs." })}
      ${chart("Largest ratio", "largest_ratio", ratio, { empty: "The trainer told no logprobs." })}
    </div>
    <${Worst} sums=${sums} chosen=${chosen} query=${query} />`;
}

/** The sessions with the lowest scores of a step of each run: the newest, or the one that the address names as `at`. */
function Worst({ sums, chosen, query }) {
  return chosen.map((run) => html`<${WorstOf} key=${run} run=${run} steps=${stepsOf(sums, run)} query=${query} />`);
}

function WorstOf({ run, steps, query }) {
  if (!steps.length) return null;
  const entry = steps.find(({ step }) => String(step) === query.at) ?? steps[0];
  return html`<section class="card training-table" aria-label=${`Lowest rewards of ${run}`}>
    <div class="bar"><h2>${run}, step ${entry.step}: lowest rewards</h2>
      <label class="small">Step <select aria-label=${`Step of ${run}`} onChange=${({ target: { value } }) => change(query, { at: value })}>
        ${steps.map(({ step }) => html`<option key=${step} value=${step} selected=${step === entry.step}>${step}</option>`)}</select></label>
      <span class="small">all of the step: <${Extremes} query=${sessionsOf(entry, query)} /></span></div>
    <table><thead><tr><th scope="col">session</th><th scope="col" class="number">reward</th></tr></thead>
    <tbody>${entry.worst.map(({ session_id, score }) => html`<tr key=${session_id}>
      <th scope="row"><a href=${link("session", session_id)}><${Short} text=${session_id} length=${40} /></a></th><td class="number">${reward(score)}</td></tr>`)}</tbody></table>
    <p class="quiet small">${number(entry.rewarded)} of ${plural(entry.sessions, "session")} have a reward.</p></section>`;
}
