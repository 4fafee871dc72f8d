// States as a word with a sign, so that colour alone tells nothing.
import { html } from "./html.js";
import { hasIcon, Icon } from "./icon.js";

const STATES = {
  active: ["info", "dot", "open"],
  ended: ["good", "check", "ended"],
  running: ["info", "half", "running"],
  complete: ["good", "check", "complete"],
  failed: ["bad", "cross", "failed"],
  aborted: ["warn", "stop", "aborted"],
  expired: ["warn", "clock", "expired"],
  abandoned: ["warn", "clock", "abandoned"],
  superseded: ["past", "redo", "superseded"],
  forked: ["past", "fork", "forked"],
};

/** A state of a session, turn or anything else; a state that is not known is shown as it is. */
export function Status({ status, text, title }) {
  const [kind, sign, word] = (Object.hasOwn(STATES, status) && STATES[status]) || ["", "ring", String(status ?? "–")];
  return html`<${Badge} kind=${kind} sign=${sign} text=${text ?? word} title=${title} />`;
}

/**
 * A short word in a box. `kind`: "", "good", "info", "warn", "bad" or "past". `sign`: the name of an icon, or a
 * character that all fonts have.
 */
export function Badge({ kind = "", sign, text, title }) {
  return html`<span class=${`badge ${kind}`} title=${title}>
    ${sign && (hasIcon(sign) ? html`<${Icon} name=${sign} />` : html`<span aria-hidden="true">${sign}</span>`)}${text}
  </span>`;
}
