// One step of a trainer: the turns that went into it, with a way to their tokens, in pages.
import { get } from "../../lib/api.js";
import { compact, number, plural } from "../../lib/format.js";
import { html, useEffect, useState } from "../../lib/html.js";
import { Failure, Waiting } from "../../lib/notice.js";
import { link } from "../../lib/route.js";
import { Short } from "../../lib/text.js";
import { useTitle } from "../../lib/title.js";
import { Extremes } from "../sessions/extremes.js";
import { kl, ratio, samplerName, summed } from "./training_words.js";

const PAGE = 200;

export function StepPage({ trainer, step }) {
  useTitle(`Step ${step} of ${trainer}`);
  const { turns, cursor, error, more, loading } = useTurns(`trajectories/steps/${encodeURIComponent(trainer)}/${step}`);
  return html`<div class="overview">
    <p class="small"><a href=${link("training", "", { trainer })}>All steps</a></p>
    <h1>Step ${step} of ${trainer}</h1>
    <p class="small">Rewards of its sessions: <${Extremes} query=${{ trained: `${trainer}/${step}` }} /></p>
    ${error && html`<${Failure} what="Loading the step" error=${error} retry=${more} />`}
    ${turns.length > 0 && html`<${Turns} turns=${turns} />`}
    ${loading && html`<${Waiting} />`}
    ${cursor && !loading && html`<button type="button" onClick=${more}>More turns</button>`}
    <p class="quiet small" role="status">${turns.length > 0 ? `${plural(turns.length, "turn")}${cursor ? " so far" : ""}` : ""}</p>
  </div>`;
}

/** The turns that were read, and `more()` that reads the next page. */
function useTurns(path) {
  const [state, setState] = useState({ turns: [], cursor: null, error: null, loading: true });
  const read = (cursor) => {
    setState((old) => ({ ...old, loading: true, error: null }));
    const query = cursor ? { cursor, limit: PAGE } : { limit: PAGE };
    get(path, query).then(
      (page) => setState((old) => ({ turns: [...old.turns, ...page.turns], cursor: page.cursor, error: null, loading: false })),
      (error) => setState((old) => ({ ...old, error, loading: false })),
    );
  };
  useEffect(() => read(null), [path]);
  return { ...state, more: () => read(state.cursor) };
}

function Turns({ turns }) {
  return html`<section class="card training-table" aria-label="Turns"><table>
    <thead><tr><th scope="col">session</th><th scope="col">turn</th><th scope="col" class="number">tokens</th>
      <th scope="col" class="number">masked</th><th scope="col" class="number">clipped</th><th scope="col" class="number">KL</th>
      <th scope="col" class="number">largest ratio</th><th scope="col">sampled by</th></tr></thead>
    <tbody>${turns.map((turn) => html`<${Turn} key=${turn.interaction_id} turn=${turn} sums=${summed(turn.parts)} />`)}</tbody></table></section>`;
}

function Turn({ turn, sums }) {
  const samplers = [...new Set(turn.parts.map((part) => `${samplerName(part)} v${part.version}`))].join(", ");
  const tokens = link("session", turn.session_id, { turn: turn.interaction_id, show: "tokens" });
  return html`<tr>
    <th scope="row"><a href=${link("session", turn.session_id)}><${Short} text=${turn.session_id} length=${28} /></a></th>
    <td data-label="turn"><a href=${tokens}>its tokens</a></td>
    <td class="number" data-label="tokens">${number(sums.tokens)}</td><td class="number" data-label="masked">${compact(sums.masked)}</td>
    <td class="number" data-label="clipped">${compact(sums.clipped)}</td><td class="number" data-label="KL">${kl(sums.kl)}</td>
    <td class="number" data-label="largest ratio">${ratio(sums.largest_ratio)}</td><td class="small" data-label="by" title=${samplers}>${samplers}</td></tr>`;
}
