// A part of a page that is drawn once somebody opens it.
import { html, useState } from "./html.js";

/** `title`: a template; `open`: whether it is open at first. */
export function Unfold({ title, open = false, children, class: name = "" }) {
  const [shown, setShown] = useState(open);
  return html`<details class=${name} open=${open} onToggle=${(event) => setShown(event.currentTarget.open)}>
    <summary class="small">${title}</summary>
    ${shown && children}
  </details>`;
}
