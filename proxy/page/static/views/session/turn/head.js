// The head of a turn: what became of it, what it cost, and when.
import { Badge, Status } from "../../../lib/badge.js";
import { duration, number, plural, reward, when } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { inWords } from "../../../lib/words.js";
import { Line, LongText } from "./texts.js";
import { timing } from "./timing.js";

/** `turn`: with its times. `reasons`: of the API. */
export function TurnHead({ turn, reasons }) {
  return html`<header class="turn-head">
    <div class="bar">
      <h2>${turn.turn === null ? "Turn without a number" : `Turn ${turn.turn}`}</h2>
      <${Status} status=${turn.status} title=${reasons.status?.[turn.status]} />
      ${turn.status === "complete" &&
      html`<${Badge} kind=${NO_FORKS.includes(turn.reason) ? "" : "past"} sign=${NO_FORKS.includes(turn.reason) ? undefined : "fork"}
        text=${inWords(turn.reason)} title=${reasons.reason?.[turn.reason]} />`}
      ${turn.finish_reason && html`<${Badge} kind=${turn.finish_reason === "length" ? "warn" : ""} text=${`ended: ${inWords(turn.finish_reason)}`} title=${reasons.finish_reason?.[turn.finish_reason]} />`}
      ${turn.purpose && turn.purpose !== "main" && html`<${Badge} kind="info" text=${`purpose: ${turn.purpose}`} />`}
      ${turn.agent && html`<span class="small">agent <${Line} text=${turn.agent} length=${40} class="mono" /></span>`}
      ${turn.route && html`<span class="badge" title=${`the route that answered; kind ${turn.route_kind}`}>route <${Line} text=${turn.route} length=${40} /></span>`}
      ${!turn.trainable && html`<${Badge} kind="warn" text="marked: not trained" title="rl/mark said trainable: false" />`}
      ${turn.spans.length > 0 && html`<${Badge} kind="info" text=${`trained: ${turn.spans.map(([from, to]) => `${from}–${to}`).join(", ")}`} title="The ranges of output tokens that rl/mark chose, from the first to the one before the last" />`}
    </div>
    <dl class="turn-facts">${facts(turn).map(([name, value, title]) => html`<div key=${name} title=${title}><dt>${name}</dt><dd class="tabular">${value}</dd></div>`)}</dl>
    <${Times} turn=${turn} />
  </header>`;
}

const NO_FORKS = ["first", "continued", "new_root"];

function facts(turn) {
  const cached = turn.cached_tokens === null ? "" : ` (${number(turn.cached_tokens)} cached)`;
  const thought = turn.reasoning_tokens ? ` (${number(turn.reasoning_tokens)} reasoning)` : "";
  const named = Object.entries(turn.rewards);
  return [
    ["prompt", `${number(turn.prompt_tokens)}${cached}`, "Tokens of the whole prompt, and those that the engine had in its cache"],
    ["output", `${number(turn.output_tokens)}${thought}`, "Sampled tokens"],
    ["reward", html`${reward(turn.reward)}${named.length > 0 && html`<span class="quiet"> and ${plural(named.length, "named one")}</span>`}`, "As set for this turn; those with a name are listed below"],
    ["return", reward(turn.return), "The rewards of this turn and of those after it, discounted"],
    ["version", versions(turn.versions), "Weights that the tokens were sampled with"],
    ["api", turn.api, "The API that the agent used"],
    ["model", turn.model ? html`<${Line} text=${turn.model} length=${24} />` : "–", "The name that the agent asked for"],
    ...(turn.stop_string === null ? [] : [["stop string", html`<${Line} text=${turn.stop_string} length=${24} class="mono" />`, "It ended the output"]]),
  ];
}

const versions = (runs) =>
  runs.length === 0 ? "–" : runs.length === 1 ? String(runs[0][1]) : runs.map(([count, version]) => `${version} (${number(count)} tok)`).join(" → ");

/** The time of the turn as a bar: the wait for the first token, then sampling. */
function Times({ turn }) {
  const { total, wait, sampling, rate } = timing(turn.times, turn.output_tokens);
  if (total === null) return html`<p class="small quiet">begun ${when(turn.times.created_at)}</p>`;
  const share = total > 0 && wait !== null ? Math.round((wait / total) * 100) : wait === null ? 100 : 0;
  return html`<div class="turn-times small" title=${`begun ${when(turn.times.created_at)}, ended ${when(turn.times.completed_at)}`}>
    <div class="turn-bar" aria-hidden="true">
      <span class="turn-bar-wait" style=${{ width: `${share}%` }}></span><span class="turn-bar-sampling" style=${{ width: `${100 - share}%` }}></span>
    </div>
    <span class="tabular">
      ${wait === null ? html`<span class="quiet">no token came</span>` : html`<span class="turn-key turn-key-wait">${duration(wait)} to the first token</span>
      ${" "}<span class="turn-key turn-key-sampling">${duration(sampling)} sampling</span>${rate === null ? "" : ` · ${number(Math.round(rate))} tokens/s`}`}
      <span class="quiet"> · ${duration(total)} in all</span>
    </span>
  </div>`;
}

/** The error of a turn that failed, in full, and what its status means. */
export function TurnError({ turn, reasons }) {
  if (turn.status === "complete" && turn.error === null) return null;
  return html`<div class="notice bad turn-error" role="note">
    <strong>${turn.status}</strong><span class="quiet small">${reasons.status?.[turn.status]}</span>
    ${turn.error !== null && html`<${LongText} text=${turn.error} />`}
  </div>`;
}
