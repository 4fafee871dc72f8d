// The numbers of now, at a glance.
import { compact, duration, number, percent } from "../../lib/format.js";
import { html } from "../../lib/html.js";

/** `of`: the statistics (docs/http-api.md). */
export function Tiles({ of }) {
  const { rates, first_token_s: first, sessions } = of;
  const cached = rates.prompt_tokens_per_s > 0 ? percent(rates.cached_tokens_per_s / rates.prompt_tokens_per_s) : "–";
  const retried = of.retries.attached + of.retries.replayed;
  return html`<dl class="overview-tiles" aria-label="Now">
    <${Tile} name="Turns / s" value=${compact(rates.turns_per_s)} more=${`${compact(of.turns.complete)} in all`} title=${`${number(of.turns.complete)} complete turns since the start; the rate is of the last ${rates.over_s} s`} />
    <${Tile} name="Output tokens / s" value=${compact(rates.output_tokens_per_s)} more=${`${compact(of.tokens.output)} in all`} title=${`${number(of.tokens.output)} sampled tokens since the start`} />
    <${Tile} name="Prompt tokens / s" value=${compact(rates.prompt_tokens_per_s)} more=${`${cached} cached`} title=${`${number(of.tokens.prompt)} tokens of prompts since the start, ${number(of.tokens.cached)} of them in the engine's prefix cache`} />
    <${Tile} name="First token" value=${duration(first.p50)} more=${`p95 ${duration(first.p95)}`} title="Half of the turns of the last five minutes had their first token within this time, 95 of 100 within that of p95" />
    <${Tile} name="In flight" value=${compact(of.in_flight)} more=${`${compact(of.waiting)} waiting`} kind=${of.waiting > 0 ? "warn" : ""} title="Turns that run now, and requests that wait for a paused engine or for an engine server" />
    <${Tile} name="Failed turns" value=${compact(of.turns.failed)} more=${`${compact(of.turns.aborted)} aborted`} kind=${of.turns.failed > 0 ? "bad" : ""} title="Since the start: turns that the engine or the server failed, and turns whose client left" />
    <${Tile} name="Retries" value=${compact(retried)} more=${`${compact(of.resubmissions.lost + of.resubmissions.pause)} resubmitted`} title=${`${number(of.retries.attached)} requests joined their earlier attempt, ${number(of.retries.replayed)} got its answer again; the engine got ${number(of.resubmissions.pause)} requests again after a pause, ${number(of.resubmissions.lost)} after a lost server`} />
    <${Tile} name="Live sessions" value=${compact(sessions?.active)} more=${`${compact(of.session_counts.started)} started`} title="Sessions of the database that have not ended, at most 100,000; and how many this server started" />
    <${Tile} name="To be claimed" value=${compact(sessions?.waiting)} more=${backlog(sessions)} title="Ended sessions that no trainer has claimed or acknowledged, those leased to one, and how long the oldest has waited" />
  </dl>`;
}

function backlog(sessions) {
  if (sessions === null) return "no database";
  const leased = `${compact(sessions.leased)} leased`;
  return sessions.oldest_wait_s === null ? leased : `${leased}, ${duration(sessions.oldest_wait_s)}`;
}

function Tile({ name, value, more, title, kind = "" }) {
  return html`<div class="card overview-tile" title=${title}>
    <dt>${name}</dt>
    <dd class=${`overview-figure tabular ${kind}`}>${value}</dd>
    <dd class="quiet small tabular">${more}</dd>
  </div>`;
}
