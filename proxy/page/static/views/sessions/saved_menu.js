// The filters that the reader has named, in a menu: links to their addresses, and a field to name the present ones.
import { html, useState } from "../../lib/html.js";
import { printable } from "../../lib/printable.js";
import { link } from "../../lib/route.js";
import { Short } from "../../lib/text.js";
import { forgetFilter, saveFilter, savedFilters } from "./saved_filters.js";

const LONGEST_NAME = 60;

/** `query`: that of the address, which is what is saved. */
export function SavedMenu({ query }) {
  const [filters, setFilters] = useState(() => savedFilters());
  const [failed, setFailed] = useState(false);
  const [open, setOpen] = useState(false);
  const change = (kept) => {
    setFailed(!kept);
    setFilters(savedFilters());
  };
  const save = (event) => {
    event.preventDefault();
    const field = event.currentTarget.closest("details").querySelector("input");
    const name = field.value.trim();
    if (name === "") return;
    change(saveFilter(name, query));
    field.value = "";
  };
  const toggled = (event) => {
    setOpen(event.currentTarget.open);
    setFilters(savedFilters());
  };
  return html`<details class="sessions-saved" onToggle=${toggled}>
    <summary>Saved filters${filters.length > 0 && html` <span class="quiet">${filters.length}</span>`}</summary>
    ${open && html`<div class="card sessions-saved-menu">
      ${filters.length === 0 && html`<p class="quiet small">This browser has none. A saved filter is an address, which can also be sent.</p>`}
      <ul>${filters.map(({ name, query: saved }) => html`<li key=${name}><a href=${link("sessions", "", saved)}><${Short} text=${name} length=${40} class="" /></a>
        <button type="button" class="plain" aria-label=${`Forget ${printable(name, { line: true })}`} onClick=${() => change(forgetFilter(name))}>✕</button></li>`)}</ul>
      <div class="bar"><input aria-label="Name of the saved filter" placeholder="Name" maxlength=${LONGEST_NAME} autocomplete="off"
        onKeyDown=${(event) => event.key === "Enter" && save(event)} />
        <button type="button" onClick=${save}>Save this view</button></div>
      ${failed && html`<p class="bad small" role="alert">This browser does not keep it: storage is blocked or full.</p>`}
    </div>`}
  </details>`;
}
