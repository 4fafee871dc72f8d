// The header of a session: what it is, how it ended, what it is worth, and its counts.
import { Badge, Status } from "../../lib/badge.js";
import { Age } from "../../lib/clock.js";
import { CopyButton } from "../../lib/copy.js";
import { compact, duration, number, reward, when } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { printable } from "../../lib/printable.js";
import { useReasons } from "../../lib/reasons.js";
import { whyReturnsDiffer } from "../../lib/returns_why.js";
import { link } from "../../lib/route.js";
import { Short, Text } from "../../lib/text.js";
import { factsOf } from "./session_facts.js";

/**
 * `name`: the session id; `tree`: the session, undefined before it is read; `nodes`: its interactions and running calls;
 * `children`: the end of the line of figures.
 * The heading is one element from the beginning on: it may have the focus.
 */
export function SessionHeader({ name, tree, nodes, children }) {
  return html`<header class="session-head">
    <div class="bar">
      <h1><${Short} text=${name} length=${48} class="" /></h1>
      ${tree && html`<${About} tree=${tree} />`}
    </div>
    ${tree && html`<${Facts} tree=${tree} facts=${factsOf(nodes)}>${children}<//>`}
  </header>`;
}

const About = ({ tree }) => html`
      <${CopyButton} text=${tree.session_id} label="session id" />
      <${Score} tree=${tree} />
      <${Status} status=${tree.status} />
      <${Outcome} tree=${tree} />
      ${tree.group_id && html`<span class="quiet">group <a href=${link("groups", tree.group_id)}><${Short} text=${tree.group_id} /></a></span>`}
      ${tree.task_id && html`<span class="quiet">task <a href=${link("sessions", "", { task: tree.task_id })}><${Short} text=${tree.task_id} /></a></span>`}
      <a href=${link("compare", "", { a: tree.session_id })}>compare…</a>
      <span class="quiet push" title=${`Started ${when(tree.created_at)}${tree.ended_at ? `, ended ${when(tree.ended_at)}` : ""}`}>
        ${tree.ended_at ? html`took ${duration(tree.ended_at - tree.created_at)}, ended ` : "started "}<${Age} at=${tree.ended_at ?? tree.created_at} /> ago
      </span>`;

const Facts = ({ tree, facts, children }) => html`<div class="session-facts">
      <${Returns} tree=${tree} facts=${facts} />
      <${Fact} name=${facts.turns === 1 ? "turn" : "turns"} value=${number(facts.turns)} />
      ${facts.running > 0 && html`<${Fact} name="running" value=${number(facts.running)} />`}
      <${Fact} name=${facts.forks === 1 ? "fork" : "forks"} value=${number(facts.forks)} />
      ${tree.unaligned > 0 && html`<${Fact} name="unaligned" value=${number(tree.unaligned)} kind="warn" />`}
      ${Object.entries(facts.lost).map(([name, count]) => html`<${Fact} name=${name} value=${number(count)} kind=${name === "failed" ? "bad" : "warn"} />`)}
      <${Fact} name="sampled tokens" value=${compact(facts.sampled)} title=${number(facts.sampled)} />
      <${Fact} name="longest context" value=${compact(facts.longest)} title=${number(facts.longest)} />
      <${Fact} name=${facts.versions && facts.versions[0] !== facts.versions[1] ? "weight versions" : "weight version"} value=${versions(facts.versions, tree.version)} />
      <${Fact} name="discount" value=${reward(tree.discount)} title=${`credit: ${tree.credit}`} />
      <${Named} name="metrics" values=${tree.metrics} /><${Named} name="metadata" values=${tree.metadata} />
      ${children}
    </div>`;

function Outcome({ tree }) {
  const why = tree.exit_reason ? printable(tree.exit_reason) : undefined;
  return html`${tree.outcome && html`<${Badge} kind=${tree.outcome === "Finished" ? "good" : "warn"} text=${tree.outcome} title=${why} />`}
    ${tree.withdrawn && html`<${Badge} text="withdrawn" title="No group, claim or export counts it" />`}
    ${tree.exit_reason && html`<span class="small quiet"><${Short} text=${tree.exit_reason} length=${40} class="" /></span>`}
    ${tree.finished === false && html`<${Badge} kind="warn" text="unfinished" title="finished: false" />`}`;
}

/** The score as an export gives it, and why it would leave the session out. */
function Score({ tree }) {
  const meanings = useReasons();
  const why = tree.left_out ? `An export with unrewarded: skip leaves this session out: it ${meanings.left_out?.[tree.left_out] ?? tree.left_out}.` : undefined;
  return html`<${Fact} name="score" value=${reward(tree.score)} title=${why} />`;
}

/** The range of the returns, and why they differ from the score; nothing if they do not. */
function Returns({ tree, facts }) {
  const why = whyReturnsDiffer({ ...tree, ...facts });
  if (why === null) return null;
  return html`<details class="named"><summary>returns <span class="quiet">${reward(facts.returns.min)} … ${reward(facts.returns.max)}</span></summary>
    <p class="card small">${why}</p></details>`;
}

const Fact = ({ name, value, title, kind = "" }) =>
  html`<span class=${`fact ${kind}`} title=${title}><span class="fact-value tabular">${value}</span> <span class="fact-name">${name}</span></span>`;

/** A table of names and values that opens on demand. */
function Named({ name, values }) {
  const entries = Object.entries(values ?? {});
  if (!entries.length) return null;
  return html`<details class="named">
    <summary>${name} <span class="quiet">${entries.length}</span></summary>
    <table class="card" aria-label=${name}>
      ${entries.map(([key, value]) => html`<tr><th scope="row"><${Text} text=${key} /></th><td><${Text} text=${shown(value)} /></td></tr>`)}
    </table>
  </details>`;
}

const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value)).slice(0, 2000);

function versions(range, start) {
  if (!range) return number(start);
  return range[0] === range[1] ? number(range[0]) : `${number(range[0])}–${number(range[1])}`;
}
