// The filters above the list. The address holds them; a text takes effect a moment after the last key.
import { compact, number } from "../../lib/format.js";
import { html, useEffect, useRef, useState } from "../../lib/html.js";
import { Icon } from "../../lib/icon.js";
import { PURPOSES, STATUSES, filterCount, orderOf, totalOf } from "./filters.js";

const PAUSE_MS = 250;
const SIGNS = { active: "dot", ended: "check", expired: "clock" };
const WORDS = { active: "open", ended: "ended", expired: "expired" };

/** `query`: that of the address. `change({name: value})` sets filters. `counts`: sessions by status, or null. */
export function FilterBar({ query, counts, change, clear, children }) {
  const set = (name) => (value) => change({ [name]: value });
  const count = filterCount(query);
  return html`<form class="sessions-filters" role="search" aria-label="Filter the sessions" onSubmit=${(event) => event.preventDefault()}>
    <div class="bar">
      <${Field} label="Search" type="search" wide placeholder="Part of a session, task or group" value=${query.search} set=${set("search")} />
      <${Statuses} chosen=${query.status ?? ""} counts=${counts} set=${set("status")} />
      ${children}
    </div>
    <div class="bar">
      <${Field} label="Group" value=${query.group} set=${set("group")} />
      <${Field} label="Task" value=${query.task} set=${set("task")} />
      <${Range} label="Reward" hint="The score of the session" query=${query} name="reward" change=${change} />
      <${Range} label="Version" hint="The weight version when the session started" query=${query} name="version" change=${change} />
      <${Choice} label="Purpose" value=${query.purpose} set=${set("purpose")} options=${[["", "any"], ...PURPOSES.map((name) => [name, name])]} />
      <${Choice} label="Forks" value=${query.forked} set=${set("forked")} options=${[["", "any"], ["yes", "with"], ["no", "without"]]} />
      <${Choice} label="Order" value=${orderOf(query)} set=${set("order")} options=${[["newest", "newest first"], ["oldest", "oldest first"]]} />
      ${count > 0 && html`<button type="button" class="plain" onClick=${clear}>Clear ${count === 1 ? "the filter" : `${count} filters`}</button>`}
    </div>
  </form>`;
}

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

function Choice({ label, value, set, options }) {
  return html`<label class="sessions-field">${label}
    <select value=${value ?? ""} onChange=${(event) => set(event.target.value)}>
      ${options.map(([key, word]) => html`<option key=${key} value=${key} selected=${key === (value ?? "")}>${word}</option>`)}
    </select>
  </label>`;
}

function Range({ label, hint, query, name, change }) {
  return html`<fieldset class="sessions-range" title=${hint}><legend class="visually-hidden">${label}</legend>
    <span aria-hidden="true">${label}</span>
    ${[["min", "least"], ["max", "greatest"]].map(([end, word]) => html`<${Draft} key=${end} class="sessions-number" label=${`${label}, ${word}`}
      inputmode="decimal" placeholder=${end} value=${query[`${name}_${end}`]} set=${(value) => change({ [`${name}_${end}`]: value })} />`)}
  </fieldset>`;
}

function Field({ label, wide, ...draft }) {
  return html`<label class=${`sessions-field ${wide ? "sessions-wide" : ""}`}>${label}<${Draft} ...${draft} /></label>`;
}

/** A text field whose value takes effect after a pause, or at Enter. What somebody types is not replaced by an older address. */
export function Draft({ value = "", set, label, class: name = "", ...more }) {
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
    timer.current = setTimeout(() => send(text), PAUSE_MS);
  };
  return html`<input class=${name} aria-label=${label} value=${draft} autocomplete="off" spellcheck=${false} ...${more}
    onInput=${(event) => typed(event.target.value)} onKeyDown=${(event) => event.key === "Enter" && send(event.target.value)} />`;
}
