// The filters above the list. The address holds them; a text takes effect a moment after the last key.
import { compact, number } from "../../lib/format.js";
import { html, useEffect, useRef, useState } from "../../lib/html.js";
import { Icon } from "../../lib/icon.js";
import { useNarrow } from "../../lib/narrow.js";
import { conditionsOf } from "./conditions.js";
import { FURTHER, OFTEN, PURPOSES, STATUSES, filterCount, orderOf, totalOf } from "./filters.js";
import { choices } from "./order.js";
import { SavedMenu } from "./saved_menu.js";

const PAUSE_MS = 250;
const SIGNS = { active: "dot", ended: "check", expired: "clock" };
const WORDS = { active: "open", ended: "ended", expired: "expired" };
const CONDITIONS = "KEY=VALUE, KEY>=NUMBER or KEY<=NUMBER, with commas between";

/**
 * `query`: that of the address. `change({name: value})` sets filters. `counts`: sessions by status, or null. `keys`: names of
 * values of metadata and metrics that the list can be sorted by. `texts`: whether the server finds sessions by their texts. `children`: the end of the first line.
 */
export function FilterBar({ query, counts, keys, texts, change, clear, children }) {
  const set = (name) => (value) => change({ [name]: value });
  const count = filterCount(query);
  const narrow = useNarrow();
  const hidden = filterCount(Object.fromEntries(Object.entries(query).filter(([name]) => (narrow ? OFTEN : []).concat(FURTHER).includes(name))));
  const [open, setOpen] = useState(!narrow && hidden > 0);
  const often = html`<${Often} query=${query} change=${change} set=${set} />`;
  return html`<form class="sessions-filters" role="search" aria-label="Filter the sessions" onSubmit=${(event) => event.preventDefault()}>
    <div class="bar">
      <${Field} label="Search" type="search" wide placeholder="Part of a session, task or group" value=${query.search} set=${set("search")} />
      ${texts && html`<${Field} label="Text" type="search" wide placeholder="Words or a “phrase” of a turn" value=${query.text} set=${set("text")} />`}
      <${Statuses} chosen=${query.status ?? ""} counts=${counts} set=${set("status")} />
      ${children}
    </div>
    <div class="bar">
      ${!narrow && often}
      <${Choice} label="Order" value=${orderOf(query)} set=${(order) => change({ order, first: null })} options=${choices(keys)} />
      <button type="button" class="plain" aria-expanded=${String(open)} onClick=${() => setOpen(!open)}>
        ${narrow ? "Filters" : "More filters"}${hidden > 0 && html` <span class="quiet">${hidden}</span>`} <${Icon} name=${open ? "up" : "down"} /></button>
      <${SavedMenu} query=${query} />
      ${count > 0 && html`<button type="button" class="plain" onClick=${clear}>Clear ${count === 1 ? "the filter" : `${count} filters`}</button>`}
    </div>
    ${open && html`<div class="bar">${narrow && often}<${Further} query=${query} change=${change} set=${set} /></div>`}
  </form>`;
}

const Often = ({ query, change, set }) => html`
  <${Field} label="Group" value=${query.group} set=${set("group")} />
  <${Field} label="Task" value=${query.task} set=${set("task")} />
  <${Range} label="Reward" hint="The score of the session" query=${query} name="reward" change=${change} />
  <${Range} label="Version" hint="The weight version when the session started" query=${query} name="version" change=${change} />
  <${Choice} label="Purpose" value=${query.purpose} set=${set("purpose")} options=${[["", "any"], ...PURPOSES.map((name) => [name, name])]} />
  <${Choice} label="Forks" value=${query.forked} set=${set("forked")} options=${[["", "any"], ["yes", "with"], ["no", "without"], ["2", "2 or more"], ["5", "5 or more"]]} />`;

const Further = ({ query, change, set }) => html`
  <${Range} label="Turns" hint="Complete turns" query=${query} name="turns" change=${change} />
  <${Range} label="Tokens" hint="Prompt and sampled tokens of all complete turns" query=${query} name="tokens" change=${change} />
  <${Range} label="Seconds" hint="From the start to the end, or to the last change" query=${query} name="lasted" change=${change} />
  <${Field} label="Metadata" wide placeholder="step=12, env=sokoban" hint=${CONDITIONS} value=${query.metadata} set=${set("metadata")} valid=${(text) => conditionsOf(text) !== null} />
  <${Field} label="Trained in" placeholder="TRAINER/STEP" hint="A step of a trainer that told of its tokens" value=${query.trained} set=${set("trained")} valid=${(text) => text === "" || /.\/\d+$/.test(text)} />
  <${Choice} label="Validation" value=${query.validation} set=${set("validation")} options=${[["", "any"], ["skip", "without"], ["only", "only"]]} />
  <${Choice} label="Withdrawn" value=${query.withdrawn} set=${set("withdrawn")} options=${[["", "any"], ["no", "without"], ["yes", "only"]]} />`;

/** One of the statuses, or all, each with its number of sessions. */
function Statuses({ chosen, counts, set }) {
  const all = totalOf(counts, "");
  return html`<div class="sessions-statuses" role="group" aria-label="Status">
    ${["", ...STATUSES].map((status) => html`<button type="button" key=${status} aria-pressed=${String(chosen === status)}
      onClick=${() => set(status)} title=${counts ? number(status ? counts[status] : all) : "Not counted with these filters"}>
      ${status && html`<${Icon} name=${SIGNS[status]} />`}${status ? WORDS[status] : "all"}
      ${counts && html`<span class="quiet tabular">${compact(status ? counts[status] : all)}</span>`}
    </button>`)}
  </div>`;
}

function Choice({ label, value = "", set, options }) {
  const id = `sessions-${label}`;
  const offered = options.some(([key]) => key === value) ? options : [...options, [value, value]];
  return html`<span class="sessions-field"><label for=${id}>${label}</label>
    <select id=${id} value=${value} onChange=${(event) => set(event.target.value)}>
      ${offered.map(([key, word]) => html`<option key=${key} value=${key} selected=${key === value}>${word}</option>`)}
    </select>
  </span>`;
}

function Range({ label, hint, query, name, change }) {
  return html`<fieldset class="sessions-range" title=${hint}><legend class="visually-hidden">${label}</legend>
    <span aria-hidden="true">${label}</span>
    ${[["min", "least"], ["max", "greatest"]].map(([end, word]) => html`<${Draft} key=${end} class="sessions-number" label=${`${label}, ${word}`}
      inputmode="decimal" placeholder=${end} value=${query[`${name}_${end}`]} set=${(value) => change({ [`${name}_${end}`]: value })} />`)}
  </fieldset>`;
}

function Field({ label, wide, hint, ...draft }) {
  return html`<label class=${`sessions-field ${wide ? "sessions-wide" : ""}`} title=${hint}>${label}<${Draft} ...${draft} /></label>`;
}

/**
 * A text field whose value takes effect after a pause, or at Enter. What somebody types is not replaced by an older address.
 * What is not `valid` takes effect only at Enter: it is not complete yet.
 */
export function Draft({ value = "", set, label, valid = () => true, class: name = "", ...more }) {
  const [draft, setDraft] = useState(value);
  const timer = useRef(null);
  const sent = useRef(value);
  const latest = useRef(set);
  latest.current = set; // other filters may have changed while the timer ran
  useEffect(() => {
    if (value !== sent.current) setDraft(value);
    sent.current = value;
  }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const send = (text) => {
    clearTimeout(timer.current);
    sent.current = text;
    latest.current(text);
  };
  const typed = (text) => {
    setDraft(text);
    clearTimeout(timer.current);
    if (valid(text)) timer.current = setTimeout(() => send(text), PAUSE_MS);
  };
  return html`<input class=${name} aria-label=${label} value=${draft} autocomplete="off" spellcheck=${false} aria-invalid=${valid(draft) ? undefined : "true"} ...${more}
    onInput=${(event) => typed(event.target.value)} onKeyDown=${(event) => event.key === "Enter" && send(event.target.value)} />`;
}
