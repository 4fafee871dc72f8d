// What was recorded beside one token: its kept set and mass, alternatives, and its experts as a strip.
import { number } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { expertWords, hueOf, keptWords, layerWords, listed, quoted, withoutExperts } from "./column_words.js";

const ALTERNATIVES = 5;

/** `page`: see token_columns.js; `recorded`: names of columns; `at`: the index of the token. */
export function ColumnDetails({ model, recorded, page, at }) {
  if (recorded.length === 0) return null;
  const row = (name) => page?.columns?.[name]?.[at - page.columns.start] ?? null;
  const state = page === undefined ? "…" : page.error ? `could not be read: ${page.error.message}` : null;
  const size = page?.columns?.vocab_size ?? null;
  return html`<section aria-label="Recorded beside the chosen token" aria-busy=${page === undefined}><dl class="tokens-columns">
    ${recorded.includes("kept") && html`<${Kept} row=${row("kept")} size=${size} state=${state} sampled=${model.sampled[at]} />`}
    ${recorded.includes("top_logprobs") && html`<${Alternatives} row=${row("alternatives")} state=${state} sampled=${model.sampled[at]} />`}
    ${recorded.includes("routed_experts") && html`<div class="tokens-experts"><dt>Experts</dt>
      <dd style=${{ minHeight: heightOf(page) }}><${Experts} row=${row("experts")} state=${state} at=${at} count=${model.count} /></dd></div>`}
  </dl></section>`;
}

/** The height of a strip and its words, kept for tokens without experts, so that nothing jumps as the pointer moves. */
const heightOf = (page) => `${8 * (page?.columns?.experts?.find((row) => row !== null)?.[0]?.length ?? 2) + 24}px`;

/** Why there is no row: it is being read, or could not be; the token was not sampled; or it is missing. */
const without = (state, sampled) => html`<span class="quiet">${state ?? (sampled ? html`<span class="warn">missing</span>` : "not sampled")}</span>`;

function Kept({ row, size, state, sampled }) {
  const { texts, more } = row ? listed(row) : { texts: [], more: 0 };
  return html`
    <div class="tokens-kept"><dt>Kept set</dt><dd>${row ? keptWords(row, size) : without(state, sampled)}</dd></div>
    <div class="tokens-ids"><dt>${row?.excluded ? "Excluded" : "Likeliest of it"}</dt>
      <dd class="cut">${texts.length === 0 ? "–" : texts.map((text) => html`<code>${text}</code> `)}
        ${more > 0 && html`<span class="quiet">and ${number(more)} more</span>`}</dd></div>`;
}

function Alternatives({ row, state, sampled }) {
  const words = row?.slice(0, ALTERNATIVES).map(([id, text, value]) => html`<code>${quoted(text, id)}</code> <span class="quiet">${value === null ? "–" : value.toFixed(2).replace("-", "−")}</span> `);
  return html`<div class="tokens-ids"><dt>Alternatives</dt><dd class="cut">${words ?? without(state, sampled)}</dd></div>`;
}

/** A column of cells for each layer, coloured by expert. The words below say the same. */
function Experts({ row, state, at, count }) {
  if (row === null) return html`<span class=${state === null && at < count - 1 ? "warn" : "quiet"}>${state ?? withoutExperts(at, count)}</span>`;
  const words = expertWords(row);
  return html`<div class="expert-strip" role="img" aria-label=${words}>
      ${row.map((experts, layer) => html`<span class="expert-layer" key=${layer} title=${layerWords(experts, layer)}>
        ${experts.map((expert) => html`<span class=${expert === null ? "expert missing" : "expert"} style=${expert === null ? null : { "--hue": hueOf(expert) }}></span>`)}
      </span>`)}
    </div>
    <div class="cut small quiet tabular" title=${words} aria-hidden="true">${words}</div>`;
}
