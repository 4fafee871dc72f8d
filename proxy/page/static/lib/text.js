// Texts in the page: what is hidden in them is shown, long ones are shortened and have their whole text in the title.
import { clip, shorten } from "./format.js";
import { html } from "./html.js";
import { parts, printable } from "./printable.js";

/** A text with its hidden characters as signs, isolated from the direction of the text around it. */
export function Text({ text, class: name = "" }) {
  return html`<bdi class=${name}>${parts(text).map(drawn)}</bdi>`;
}

/** An id, or another text that is told by both of its ends, in at most `length` characters. */
export function Short({ text, length = 24, class: name = "mono" }) {
  const seen = printable(text, { line: true });
  return html`<bdi class=${name} title=${seen.length > length ? seen : undefined}>${shorten(seen, length)}</bdi>`;
}

/** The beginning of a text, on one line. */
export function Line({ text, length = 120, class: name = "" }) {
  const seen = printable(text.slice(0, length * 2), { line: true });
  return html`<bdi class=${name} title=${text.length > length ? printable(text.slice(0, 2000)) : undefined}>${clip(seen, length)}</bdi>`;
}

const drawn = (part) => (typeof part === "string" ? part : html`<span class="mark" title=${part.name}>${part.sign}</span>`);
