// A text of any length: what is hidden in it is shown, white space is kept, and a long one is drawn bit by bit.
import { number } from "../../../lib/format.js";
import { html, useState } from "../../../lib/html.js";
import { Text } from "../../../lib/text.js";
import { cutAt, FOLDED, STEP } from "./fold.js";

/** `text`; `folded`: how many characters are drawn at first. `quiet` says what an empty text stands for. */
export function LongText({ text, folded = FOLDED, empty = "(empty)", class: name = "" }) {
  const [end, setEnd] = useState(() => cutAt(text, folded));
  if (text === "") return html`<p class="turn-empty quiet small">${empty}</p>`;
  const shown = Math.min(end, text.length);
  return html`<div class=${`turn-text ${name}`}>
    <pre><${Text} text=${text.slice(0, shown)} /></pre>
    ${shown < text.length && html`<${More} text=${text} shown=${shown} show=${setEnd} />`}
    ${shown === text.length && text.length > folded * 2 && html`<button type="button" class="plain" onClick=${() => setEnd(cutAt(text, folded))}>Show less</button>`}
  </div>`;
}

function More({ text, shown, show }) {
  const next = cutAt(text, shown + STEP);
  const rest = text.length - shown;
  const label = next === text.length ? `Show all ${number(text.length)} characters` : `Show the next ${number(next - shown)} of ${number(rest)} characters`;
  return html`<button type="button" class="turn-more" onClick=${() => show(next)}>${label}</button>`;
}
