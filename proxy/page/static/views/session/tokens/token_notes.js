// What stands above the tokens: what the colours mean, what an export counts, and where the path was rendered anew.
import { number, plural } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { link } from "../../../lib/route.js";
import { stateCounts, tally } from "./token_model.js";
import { bandWords } from "./stream_bands.js";
import { escaped } from "./token_text.js";

const PROBABILITY = "Probability of the sampled token";
const BANDS = ["≥ 90%", "50–90%", "10–50%", "1–10%", "< 1%"];

/** The legend of a colouring with the numbers of tokens, and the counts of the export. */
export function Legend({ model, classOf, colouring, told, ends }) {
  const counts = tally(classOf);
  const entries = [[0, "context"], ...named(model, colouring, ends)].filter(([at]) => counts[at] > 0);
  return html`<div class="tokens-legend ${colouring}">
    <span class="tokens-keys" role="list" aria-label="Colours">
      ${entries.map(([at, words, title]) => html`<span role="listitem" class="tokens-key" title=${title}>
        <span class=${`token k${at} ${at ? "sampled" : "context"}`} aria-hidden="true">Ab</span>
        ${words} <span class="quiet">${number(counts[at])}</span></span>`)}
    </span>
    <span class="quiet push" title=${`Layout ${told.layout}, drift ${told.drift}: ${samplesOf(told)}`}>
      trained in the session: ${number(told.trained_tokens)} of ${number(told.sampled_tokens)}
    </span>
    ${told.left_out && html`<span class="warn">The session is left out of this export: ${told.left_out}.</span>`}
  </div>`;
}

/** The samples of the session, and the reasons why tokens are not trained with their numbers. */
function samplesOf({ samples, untrained_tokens: counts }) {
  const reasons = Object.entries(counts).map(([reason, count]) => `${reason} ${number(count)}`);
  return [plural(samples, "sample"), ...reasons].join(", ");
}

function named(model, colouring, ends) {
  if (colouring === "stream") return [...bandWords(ends), [6, "nothing told"]];
  if (colouring === "logprob") return [...BANDS, "without a logprob"].map((words, at) => [at + 1, words, PROBABILITY]);
  if (colouring === "version") return versionNames(model.versions);
  const reasons = stateCounts(model).filter(([state]) => !["context", "image", "trained"].includes(state));
  const alone = reasons.length === 1;
  const why = reasons.map(([state, count]) => (alone ? state : `${state} ${number(count)}`)).join(", ");
  const title = reasons.map(([state]) => `${state}: ${model.meanings[state]}`).join("\n");
  return [[1, "trained"], [2, `not trained: ${why}`, title]];
}

function versionNames(versions) {
  const names = Array.from({ length: 6 }, () => []);
  versions.forEach((version, at) => names[at % 6].push(`v${version}`));
  const words = names.map((each) => (each.length > 3 ? `${each[0]}, …, ${each.at(-1)}` : each.join(", ")));
  return words.map((each, at) => [at + 1, each]).filter(([, each]) => each);
}

const CONSEQUENCES = {
  fork: "An export begins a new sample there.",
  mask: "An export goes on with this prompt and trains the answers that it has token by token.",
};

/** Where a prompt does not begin with the tokens above it: what differs, and where the rest of the path is. */
export function Sections({ tokens, sessionId, query, go }) {
  const { sections, lost } = tokens;
  if (sections.length < 2) return null;
  const [before, here] = sections.slice(-2);
  const { index, sent_text, recorded_text } = here.differs;
  const last = before.turns.at(-1);
  const above = link("session", sessionId, { ...query, turn: last.interaction_id, at: null });
  return html`<div class="tokens-sections" role="note">
    <p><strong>${plural(sections.length, "section")}:</strong> the prompt of ${name(here.turns[0])} does not begin with
      the tokens of ${name(last)}. ${CONSEQUENCES[tokens.export.drift]}${" "}
      <button type="button" class="plain" onClick=${() => go(index)}>
        First difference: token ${number(index)}</button>
      <a href=${above}>Tokens of ${name(last)}</a></p>
    <p class="tokens-differs"><span class="quiet">here</span> <code class="cut">${shown(sent_text)}</code></p>
    <p class="tokens-differs"><span class="quiet">there</span> <code class="cut">${shown(recorded_text)}</code></p>
    ${lost.length > 0 && html`<p class="quiet">${lost.length === 1 ? "The answer" : "The answers"} of${" "}
      ${listed(lost.map(name))} ${lost.length === 1 ? "is" : "are"} not among these tokens as sampled.</p>`}
  </div>`;
}

const name = (turn) => (turn.turn === null ? "a turn" : `turn ${turn.turn}`);
const shown = (text) => (text === null ? "–" : text === "" ? "(ends)" : escaped(text));
const listed = (names) => (names.length > 6 ? [...names.slice(0, 3), "…", names.at(-1)] : names).join(", ");
