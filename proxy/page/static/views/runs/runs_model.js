// Figures of training runs by step: pages of sums added up, and laid beside each other for charts. Pure: no DOM.
import { conditionText } from "../sessions/conditions.js";

const ADDED = [
  "sessions", "ended", "turns", "forks", "failed", "output_tokens", "rewarded", "score_sum", "score_squares", "compared", "kl_sum",
];
const WORST = 10;
export const MOST_RUNS = 3;

/** Add a page of `GET /rl/runs` to sums by run and step, a Map: the same as `tokengrove.client.run_figures`. */
export function added(sums, entries) {
  const found = new Map(sums);
  for (const entry of entries) {
    const key = JSON.stringify([entry.run, entry.step]);
    const known = found.get(key);
    found.set(key, known ? both(known, entry) : entry);
  }
  return found;
}

function both(one, other) {
  const sum = { ...one };
  for (const name of ADDED) sum[name] = one[name] + other[name];
  const ratios = [one.largest_ratio, other.largest_ratio].filter((each) => each !== null);
  sum.largest_ratio = ratios.length ? Math.max(...ratios) : null;
  sum.worst = [...one.worst, ...other.worst].sort((a, b) => a.score - b.score || a.session_id.localeCompare(b.session_id)).slice(0, WORST);
  return sum;
}

/** The runs with a number as step, by name: [{run, sessions, steps}], the one with the most sessions first. */
export function runsOf(sums) {
  const found = new Map();
  for (const entry of sums.values()) {
    if (typeof entry.step !== "number") continue;
    const name = nameOf(entry.run);
    const known = found.get(name) ?? { run: name, sessions: 0, steps: 0 };
    found.set(name, { run: name, sessions: known.sessions + entry.sessions, steps: known.steps + 1 });
  }
  return [...found.values()].sort((one, other) => other.sessions - one.sessions || one.run.localeCompare(other.run));
}

export const nameOf = (run) => (run === null ? "unnamed" : String(run));

/** The runs that an address names, as far as they are known, else the first two. */
export function chosenRuns(runs, named) {
  const known = new Set(runs.map(({ run }) => run));
  const wanted = (named ?? "").split(",").map(decodeURIComponent).filter((run) => known.has(run));
  return (wanted.length ? wanted : runs.slice(0, 2).map(({ run }) => run)).slice(0, MOST_RUNS);
}

/** The sums of a run by step, the newest step first, of steps with rewards. */
export const stepsOf = (sums, run) => [...sums.values()]
  .filter((entry) => nameOf(entry.run) === run && typeof entry.step === "number" && entry.worst.length)
  .sort((one, other) => other.step - one.step);

/** The query of the list that selects the sessions of sums; `run` and `step`: the keys of metadata, as the address has them. */
export function sessionsOf(entry, { run, step }) {
  const conditions = [[run || "experiment", entry.run], [step || "step", entry.step]].map(([key, value]) => conditionText(key, value));
  return { metadata: conditions.join(", "), validation: "skip", withdrawn: "no" };
}

const FIGURES = {
  mean_score: (sums) => (sums.rewarded ? sums.score_sum / sums.rewarded : null),
  mean_turns: (sums) => sums.turns / sums.sessions,
  mean_output_tokens: (sums) => sums.output_tokens / sums.sessions,
  forks: (sums) => sums.forks / sums.sessions,
  failed: (sums) => sums.failed / sums.sessions,
  sessions: (sums) => sums.sessions,
  kl: (sums) => (sums.compared ? sums.kl_sum / sums.compared : null),
  largest_ratio: (sums) => sums.largest_ratio,
};

/** The data of a chart: [steps, the figure of each run at each step], null where a run does not have the step. */
export function besideEachOther(sums, runs, figure) {
  const of = new Map();
  const steps = new Set();
  for (const entry of sums.values()) {
    const name = nameOf(entry.run);
    if (typeof entry.step !== "number" || !runs.includes(name)) continue;
    steps.add(entry.step);
    of.set(`${entry.step} ${name}`, FIGURES[figure](entry));
  }
  const inOrder = [...steps].sort((one, other) => one - other);
  return [inOrder, ...runs.map((run) => inOrder.map((step) => of.get(`${step} ${run}`) ?? null))];
}
