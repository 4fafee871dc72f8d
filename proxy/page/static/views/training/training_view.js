// What trainers told: their steps in charts and as a list, the samplers that they agree with and not, and one step.
import { get } from "../../lib/api.js";
import { Age } from "../../lib/clock.js";
import { compact, number, plural } from "../../lib/format.js";
import { html, useMemo } from "../../lib/html.js";
import { useLoad } from "../../lib/load.js";
import { Empty, Loaded, Notice } from "../../lib/notice.js";
import { link, replace } from "../../lib/route.js";
import { useTitle } from "../../lib/title.js";
import { Chart } from "../overview/chart.js";
import { Extremes } from "../sessions/extremes.js";
import { StepPage } from "./step_page.js";
import { charted, kl, ratio, samplerName, trainersOf } from "./training_words.js";

const MOST_STEPS = 1000;

/** `name`: "" or TRAINER/STEP. `query.trainer`: whose steps are drawn. `query.as`: "tables" shows the numbers. */
export function TrainingView({ name, query }) {
  const [, trainer, step] = /^(.+)\/(\d+)$/.exec(name) ?? [];
  return step === undefined ? html`<${Steps} query=${query} />` : html`<${StepPage} key=${name} trainer=${trainer} step=${step} />`;
}

function Steps({ query }) {
  useTitle("Training");
  const steps = useLoad(({ signal }) => get("trajectories/steps", { limit: MOST_STEPS }, { signal }), [], { keep: true });
  const mismatch = useLoad(({ signal }) => get("trajectories/mismatch", {}, { signal }), [], { keep: true });
  const data = steps.data && mismatch.data ? { steps: steps.data.steps, ...mismatch.data } : undefined;
  const trainers = trainersOf(data?.steps ?? []);
  const trainer = trainers.includes(query.trainer) ? query.trainer : trainers[0];
  return html`<div class="overview">
    <div class="bar overview-bar-above"><h1>Training</h1>
      ${trainers.length > 0 && html`<${Controls} query=${query} trainers=${trainers} trainer=${trainer} />`}</div>
    <${Loaded} what="Loading what trainers told" from=${{ data, error: steps.error ?? mismatch.error, reload: steps.reload }}
      show=${(known) => html`<${Known} known=${known} trainer=${trainer} asTable=${query.as === "tables"} />`} />
  </div>`;
}

function Controls({ query, trainers, trainer }) {
  const change = (more) => replace("training", "", { ...query, ...more });
  const asTable = query.as === "tables";
  return html`${trainers.length > 1 && html`<label>Trainer <select value=${trainer} onChange=${({ target: { value } }) => change({ trainer: value })}>
        ${trainers.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>`}
      <div class="bar push"><button type="button" aria-pressed=${asTable} onClick=${() => change({ as: asTable ? null : "tables" })}>Tables</button></div>`;
}

function Known({ known, trainer, asTable }) {
  if (trainer === undefined) {
    return html`<${Empty} title="No trainer told anything">Trainers tell what they computed of the tokens with
      <code>client.annotate</code> or <code>POST /trajectories/annotate</code>.<//>`;
  }
  const steps = known.steps.filter((each) => each.trainer === trainer);
  return html`
    ${known.named.map((each) => html`<${Notice} kind="bad" text=${blame(each)} />`)}
    <${Charts} steps=${steps} asTable=${asTable} />
    <${Samplers} samplers=${known.samplers.filter((each) => each.trainer === trainer)} named=${known.named} />
    <${StepTable} steps=${steps} />`;
}

const blame = (each) =>
  `The logprobs of ${samplerName(each)} are far from those of the trainer ${each.trainer}: KL ${kl(each.kl)}, largest ratio ${ratio(each.largest_ratio)}, over ${plural(each.turns, "turn")}.`;

function Charts({ steps, asTable }) {
  const drawn = useMemo(() => charted(steps), [steps]);
  const common = { asTable, time: false, points: true, x: (at) => `step ${at}`, tick: String, heading: "step", save: true, empty: "No values." };
  return html`<div class="overview-grid">
    <${Chart} ...${common} title="Tokens" unit="by step" format=${compact} whole=${true} data=${drawn("trained", "masked", "clipped")}
      series=${[{ label: "trained", colour: "--c1" }, { label: "masked", colour: "--c3" }, { label: "clipped", colour: "--c5" }]} />
    <${Chart} ...${common} title="KL of trainer and sampler" unit="by step" format=${kl} least=${1e-4} data=${drawn("kl")}
      series=${[{ label: "mean", colour: "--c4" }]} empty="The trainer told no logprobs." />
    <${Chart} ...${common} title="Largest ratio" unit="by step" format=${ratio} data=${drawn("largest_ratio")}
      series=${[{ label: "largest", colour: "--c5" }]} empty="The trainer told no logprobs." />
    <${Chart} ...${common} title="Turns" unit="by step" format=${compact} whole=${true} data=${drawn("turns", "sessions")}
      series=${[{ label: "turns", colour: "--c2" }, { label: "sessions", colour: "--c6" }]} />
  </div>`;
}

function Samplers({ samplers, named }) {
  const isNamed = (each) => named.some((other) => ["trainer", "server", "dtype", "quantization"].every((part) => (other[part] ?? "") === each[part]));
  return html`<section class="card training-table" aria-label="Samplers"><h2>Samplers</h2>
    <table><thead><tr><th scope="col">sampled by</th><th scope="col" class="number">version</th><th scope="col" class="number">turns</th>
      <th scope="col" class="number">tokens</th><th scope="col" class="number">KL</th><th scope="col" class="number">largest ratio</th></tr></thead>
    <tbody>${samplers.map((each) => html`<tr>
      <th scope="row">${samplerName(each)} ${isNamed(each) && html`<strong class="bad">disagrees</strong>`}</th>
      <td class="number" data-label="version">v${each.version}</td><td class="number" data-label="turns">${number(each.turns)}</td>
      <td class="number" data-label="tokens">${compact(each.tokens)}</td><td class="number" data-label="KL">${kl(each.kl)}</td>
      <td class="number" data-label="largest ratio">${ratio(each.largest_ratio)}</td></tr>`)}</tbody></table></section>`;
}

function StepTable({ steps }) {
  return html`<section class="card training-table" aria-label="Steps"><h2>Steps</h2>
    <table><thead><tr><th scope="col">step</th><th scope="col" class="number">sessions</th><th scope="col" class="number">turns</th>
      <th scope="col" class="number">tokens</th><th scope="col" class="number">masked</th><th scope="col" class="number">clipped</th>
      <th scope="col" class="number">KL</th><th scope="col" class="number">largest ratio</th><th scope="col">told</th><th scope="col">rewards</th></tr></thead>
    <tbody>${steps.map((each) => html`<tr>
      <th scope="row"><a href=${link("training", `${each.trainer}/${each.step}`)}>${each.step}</a></th>
      <td class="number" data-label="sessions">${number(each.sessions)}</td><td class="number" data-label="turns">${number(each.turns)}</td>
      <td class="number" data-label="tokens">${compact(each.tokens)}</td><td class="number" data-label="masked">${compact(each.masked)}</td>
      <td class="number" data-label="clipped">${compact(each.clipped)}</td><td class="number" data-label="KL">${kl(each.kl)}</td>
      <td class="number" data-label="largest ratio">${ratio(each.largest_ratio)}</td><td data-label="told"><${Age} at=${each.noted_at} /></td>
      <td class="small" data-label="rewards"><${Extremes} query=${{ trained: `${each.trainer}/${each.step}` }} /></td></tr>`)}</tbody></table></section>`;
}
