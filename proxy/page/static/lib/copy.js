// A button that copies a text.
import { html, useEffect, useRef, useState } from "./html.js";
import { Icon } from "./icon.js";

/** `text`: a string, or a function that returns one or a promise of one. `label`: what is copied, "curl". */
export function CopyButton({ text, label, children, class: name = "plain" }) {
  const [done, setDone] = useState(null);
  const timer = useRef(null);
  useEffect(() => () => clearTimeout(timer.current), []);
  const copy = async () => {
    const worked = await Promise.resolve(typeof text === "function" ? text() : text).then(copied, () => false);
    setDone(worked);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setDone(null), 2000);
  };
  const said = done === null ? "" : done ? "copied" : "could not be copied";
  return html`<button type="button" class=${name} title=${`Copy ${label}`} aria-label=${`Copy ${label}`} onClick=${copy}>
    ${children ?? html`<${Icon} name="copy" />`}
    <span role="status" class=${done === false ? "bad" : "copied"}>${said}</span>
  </button>`;
}

/** Copy a text. False if the browser refuses. Without https only localhost has `navigator.clipboard`. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedByHand(text);
  }
}

function copiedByHand(text) {
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "visually-hidden";
  const before = document.activeElement;
  document.body.append(field);
  field.select();
  const worked = document.execCommand("copy");
  field.remove();
  before?.focus();
  return worked;
}
