// States as a word with a sign, so that colour alone tells nothing.
import { html } from "./html.js";

const STATES = {
  active: ["info", "●", "open"],
  ended: ["good", "✓", "ended"],
  running: ["info", "◐", "running"],
  complete: ["good", "✓", "complete"],
  failed: ["bad", "✕", "failed"],
  aborted: ["warn", "◼", "aborted"],
  expired: ["warn", "◷", "expired"],
  abandoned: ["warn", "◷", "abandoned"],
  superseded: ["past", "↺", "superseded"],
  forked: ["past", "⑂", "forked"],
};

/** A state of a session, turn or anything else; a state that is not known is shown as it is. */
export function Status({ status, text, title }) {
  const [kind, sign, word] = STATES[status] ?? ["", "○", String(status ?? "–")];
  return html`<${Badge} kind=${kind} sign=${sign} text=${text ?? word} title=${title} />`;
}

/** A short word in a box. `kind`: "", "good", "info", "warn", "bad" or "past". `sign`: one character before the word. */
export function Badge({ kind = "", sign, text, title }) {
  return html`<span class=${`badge ${kind}`} title=${title}>
    ${sign && html`<span class="badge-sign" aria-hidden="true">${sign}</span>`}${text}
  </span>`;
}
