// What a view says when it has nothing to show: it waits, there is nothing, or something failed and how to go on.
import { html } from "./html.js";
import { printable } from "./printable.js";

/** A message. `kind`: "info", "good", "warn" or "bad", which is announced at once. `children`: what can be done. */
export function Notice({ kind = "info", title, text, children }) {
  return html`<div class=${`notice ${kind}`} role=${kind === "bad" ? "alert" : "status"}>
    <div class="notice-text">${title && html`<strong>${title}</strong> `}${text}</div>
    ${children}
  </div>`;
}

/** A failed request: `what` could not be done ("Loading the sessions"), the server's words, and a button to try again. */
export function Failure({ what, error, retry }) {
  return html`<${Notice} kind="bad" title=${`${what} failed.`} text=${printable(reason(error))}>
    ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
  <//>`;
}

/** Something is on its way. */
export function Waiting({ text = "Loading…" }) {
  return html`<div class="waiting" role="status"><span class="waiting-sign" aria-hidden="true"></span>${text}</div>`;
}

/** There is nothing to show. `title` says so, `children` say why, or what would change that. */
export function Empty({ title, children }) {
  return html`<div class="empty"><h2>${title}</h2><div class="empty-text">${children}</div></div>`;
}

/**
 * What `useLoad` loaded: waits, shows a failure with a button, or `show(data)`. Old data stays under a failure.
 *
 * `what`: "Loading the sessions".
 */
export function Loaded({ what, from, show }) {
  return html`${from.error && html`<${Failure} what=${what} error=${from.error} retry=${from.reload} />`}
    ${from.data !== undefined ? show(from.data) : !from.error && html`<${Waiting} text=${`${what}…`} />`}`;
}

/** Why a request failed, in words. */
export function reason(error) {
  if (error instanceof TypeError) return "The server cannot be reached.";
  return error?.message || "For no known reason.";
}
