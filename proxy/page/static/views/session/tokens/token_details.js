// All that is known of one token: the one under the pointer, else the one of the focus.
import { html } from "../../../lib/html.js";
import { number } from "../../../lib/format.js";
import { turnName } from "./token_cells.js";
import { band } from "./token_model.js";
import { value as told } from "./stream_bands.js";
import { escaped } from "./token_text.js";

const BAND_WORDS = ["", "90% or more", "50 to 90%", "10 to 50%", "1 to 10%", "below 1%"];
const STATE_KINDS = { trained: "good", context: "quiet", image: "quiet" };

/** `at`: the index of the token. `stream`: {words, value} of what a trainer told, if it is shown. */
export function Details({ model, at, stream }) {
  const text = model.texts[at];
  const part = model.parts[model.partOf[at]];
  const run = model.states[model.stateOf[at]];
  const value = model.logprobs[at];
  const quoted = text === null ? "–" : escaped(text);
  const version = model.versionOf[at];
  return html`<section aria-label="The chosen token"><dl class="tokens-details">
    <${Fact} name="Token">${number(at)} <span class="quiet">of ${number(model.count)}</span><//>
    <${Fact} name="Id">${model.ids[at]}<//>
    <${Fact} name="Text" wide><code class="cut" title=${quoted}>${quoted}</code>${kind(model, at)}<//>
    <${Fact} name="Logprob">${value === null ? "–" : value.toFixed(4).replace("-", "−")}<//>
    <${Fact} name="Probability">${value === null ? "–" : probability(value)}${" "}
      <span class="quiet">${BAND_WORDS[band(value)]}</span><//>
    <${Fact} name="Version">${version < 0 ? "–" : `v${version}`}<//>
    <${Fact} name="From">${turnName(part)}, ${part.kind === "output" ? "answer" : "prompt"}<//>
    <${Fact} name="State" wide><strong class=${STATE_KINDS[run.state] ?? "warn"}>${run.state}</strong>
      <span>${meaning(model, run)}</span><//>
    ${stream && html`<${Fact} name=${stream.words} wide>${told(stream.value)}<//>`}
  </dl></section>`;
}

const KINDS = [
  "special token", "goes on with the character before it", "bytes that are no text", "not in the vocabulary",
];

function Fact({ name, wide, children }) {
  return html`<div class=${wide ? "wide" : ""}><dt>${name}</dt><dd>${children}</dd></div>`;
}

function kind(model, at) {
  const found = model.kindOf[at];
  const words = KINDS.filter((_, bit) => found & (1 << bit));
  return words.length > 0 && html` <span class="quiet">${words.join(", ")}</span>`;
}

/** e to the power of a logprob in percent, with the digits that matter: "97.3%", "0.0012%". */
function probability(value) {
  const share = Math.exp(value) * 100;
  if (share === 0) return "0%";
  return share >= 1 ? `${share.toFixed(1)}%` : `${share.toPrecision(2).replace(/e-(\d+)$/, "×10⁻$1")}%`;
}

function meaning(model, run) {
  const words = ` ${model.meanings[run.state] ?? ""}`.replaceAll("`", "");
  if (!run.sample) return words;
  return `${words}: the one that ends with ${run.sample.turn === null ? "a turn" : `turn ${run.sample.turn}`}`;
}
