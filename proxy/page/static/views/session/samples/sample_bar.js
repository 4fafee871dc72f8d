// One sample in the list: its turns, what it is worth, and a bar of what its tokens are. All bars have one scale.
import { compact, number, reward } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { Line } from "../../../lib/text.js";
import { useReasons } from "../../../lib/reasons.js";
import { KINDS, countsOf, piecesOf } from "./samples_shape.js";

const WIDTH = 1000, HEIGHT = 14;
const NAMES = Object.fromEntries(KINDS.map((kind) => [kind, kind === "sampled" ? "sampled, not trained here" : kind]));

/** `numbers`: turn numbers by id. `onChoose(turn)`: the sample is chosen, and a turn of it, if one was clicked. */
export function SampleBar({ sample, index, scale, chosen, numbers, onChoose }) {
  const counts = countsOf(sample);
  const words = KINDS.filter((kind) => counts[kind]).map((kind) => `${number(counts[kind])} ${NAMES[kind]}`).join(", ");
  const all = `${number(sample.tokens)} tokens: ${words}`;
  const click = (event) => onChoose(sample.turns[event.target.dataset?.turn]?.interaction_id);
  return html`<div class=${`sample ${chosen ? "is-chosen" : ""}`} onClick=${click}>
    <div class="sample-line">
      <button type="button" class="plain" data-focus aria-pressed=${chosen} onClick=${() => onChoose()}>
        Sample ${index}
      </button>
      <span class="cut">${titleOf(sample, numbers)}</span>
      ${sample.agent && html`<span class="badge"><${Line} text=${sample.agent} length=${16} /></span>`}
      ${sample.route && html`<span class="badge" title="route"><${Line} text=${sample.route} length=${16} /></span>`}
      <span class="push sample-worth tabular">${worthOf(sample)}</span>
      <span class="number quiet" title=${all}>${compact(sample.tokens)} tokens</span>
    </div>
    <svg class="sample-bar" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${all}>
      ${piecesOf(sample, WIDTH, scale).map(
        (piece) => html`<rect class=${`piece ${piece.kind}`} x=${piece.x} width=${piece.width} y="0" height=${HEIGHT}
          data-turn=${piece.turn}><title>${pieceName(piece, sample, numbers)}</title></rect>`,
      )}
    </svg>
  </div>`;
}

/** What the colours of the bars mean. */
export function SampleLegend() {
  const meanings = useReasons();
  return html`<ul class="sample-legend">
    ${KINDS.map((kind) => html`<li title=${meanings.runs?.[kind]}>
      <svg width="14" height="10" aria-hidden="true"><rect class=${`piece ${kind}`} width="14" height="10" /></svg>
      ${" "}${NAMES[kind]}</li>`)}
  </ul>`;
}

function titleOf({ turns }, numbers) {
  const names = turns.map((turn) => numbers.get(turn.interaction_id) ?? "?");
  const shown = (names.length > 6 ? [...names.slice(0, 3), "…", names[names.length - 1]] : names).join(" → ");
  return `${turns.length === 1 ? "turn" : `${turns.length} turns`} ${shown}`;
}

function worthOf(sample) {
  const parts = [`reward ${reward(sample.rewards[0])}`, `weight ${reward(sample.weight[0])}`];
  if (sample.score !== null && sample.score !== sample.rewards[0]) parts.unshift(`score ${reward(sample.score)}`);
  if (sample.advantages) parts.push(`advantage ${reward(sample.advantages[0])}`);
  return parts.join(" · ");
}

function pieceName({ start, end, kind, turn }, sample, numbers) {
  const of = sample.turns[turn];
  const where = ["trained", "sampled"].includes(kind) ? "turn" : "before turn";
  const name = of ? `, ${where} ${numbers.get(of.interaction_id) ?? of.interaction_id}` : "";
  return `${number(end - start)} tokens ${NAMES[kind]}${name} [${start}, ${end})`;
}
