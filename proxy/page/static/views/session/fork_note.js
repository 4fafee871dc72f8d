// Why a turn forked, in words, with a link to the turn that it is nearest to; or why a call failed.
import { html } from "../../lib/html.js";
import { printable } from "../../lib/printable.js";
import { useReasons } from "../../lib/reasons.js";
import { link } from "../../lib/route.js";
import { Line } from "../../lib/text.js";
import { useComparison } from "./comparison.js";
import { wordOf } from "./tree/tree_words.js";

/** `meaning`: of its reason or status. */
export function ForkNote({ sessionId, node, meaning }) {
  return html`<div class="fork-note" onClick=${(event) => event.stopPropagation()}>
    <p><strong>${wordOf(node)}</strong>: ${meaning}</p>
    ${node.status === "complete"
      ? html`<${Compared} sessionId=${sessionId} id=${node.interaction_id} />`
      : html`<p>${node.error ? printable(node.error) : "No error was recorded."}</p>`}
  </div>`;
}

function Compared({ sessionId, id }) {
  const { data, error, reload } = useComparison(sessionId, id);
  const meanings = useReasons();
  if (error) return html`<p role="alert">What it differs in could not be read. <button type="button" class="plain" onClick=${reload}>Try again</button></p>`;
  if (!data) return html`<p class="quiet" role="status">Comparing…</p>`;
  const { nearest, why, message, token } = data;
  if (!nearest) return html`<p>It has nothing in common with an earlier turn.</p>`;
  return html`<p>
      Nearest: <a href=${link("session", sessionId, { turn: nearest.interaction_id })}>turn ${nearest.turn ?? "that failed"}</a>.
      ${" "}${message ? `Message ${message.index} (${message.role}) differs first: ` : ""}${meanings.why?.[why] ?? why}${token && !message ? ` (from token ${token.index} on)` : ""}.
    </p>
    ${message && html`<${Side} name="sent" side=${message.sent} /><${Side} name="recorded" side=${message.recorded} />`}`;
}

const Side = ({ name, side }) =>
  html`<p class=${`fork-side ${name}`}><span class="quiet">${name}</span> ${side ? html`<${Line} text=${side.text || "(no text)"} length=${200} />` : html`<em>nothing</em>`}</p>`;
