// Small drawings, for no font has the signs everywhere. They are decoration: a word or a label stands beside each.
import { html } from "./html.js";

const stroke = (d) => html`<path fill="none" stroke="currentColor" stroke-width="1.6" stroke-linecap="round" stroke-linejoin="round" d=${d} />`;
const DRAWN = {
  dot: html`<circle cx="8" cy="8" r="4" fill="currentColor" />`,
  ring: html`<circle cx="8" cy="8" r="4" fill="none" stroke="currentColor" stroke-width="1.6" />`,
  half: html`<circle cx="8" cy="8" r="5" fill="none" stroke="currentColor" stroke-width="1.6" /><path fill="currentColor" d="M8 3a5 5 0 0 1 0 10z" />`,
  check: stroke("M3 8.5 6.5 12 13 4.5"),
  cross: stroke("M4 4l8 8M12 4l-8 8"),
  stop: html`<rect x="4" y="4" width="8" height="8" rx="1" fill="currentColor" />`,
  clock: html`<circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.6" />${stroke("M8 4.8V8l2.2 1.6")}`,
  up: stroke("M3.5 10.5 8 5.5l4.5 5"),
  down: stroke("M3.5 5.5 8 10.5l4.5-5"),
  redo: stroke("M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3"),
  fork: html`${stroke("M4.5 5.5v5M4.5 8.5c4 0 6.5-.8 6.8-3")}<g fill="currentColor">
    <circle cx="4.5" cy="3.8" r="1.9" /><circle cx="4.5" cy="12.2" r="1.9" /><circle cx="11.4" cy="3.8" r="1.9" /></g>`,
  copy: html`<rect x="5.5" y="5.5" width="8" height="8" rx="1.5" fill="none" stroke="currentColor" stroke-width="1.5" />
    ${stroke("M10.5 3V2.5a1 1 0 0 0-1-1h-7a1 1 0 0 0-1 1v7a1 1 0 0 0 1 1H3")}`,
};

/** Whether there is a drawing of this name. */
export const hasIcon = (name) => Object.hasOwn(DRAWN, name);

/** A drawing as large as the text around it: dot, ring, half, check, cross, stop, clock, up, down, redo, fork or copy. */
export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true">${DRAWN[name]}</svg>`;
