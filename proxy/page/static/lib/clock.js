// One clock for all ages on the page: it ticks once a second, and only while something is shown that needs it.
import { age, when } from "./format.js";
import { html, useEffect, useState } from "./html.js";

const listeners = new Set();
let timer = null;

/** The time in Unix seconds, renewed each second. */
export function useNow() {
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => listen(setNow), []);
  return now;
}

/** How long ago something was (Unix seconds), with the time in the title. */
export function Age({ at }) {
  const now = useNow();
  return html`<time class="tabular" title=${when(at)} datetime=${isoTime(at)}>${age(at, now)}</time>`;
}

function listen(listener) {
  listeners.add(listener);
  timer ??= setInterval(() => listeners.forEach((each) => each(Date.now() / 1000)), 1000);
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0) {
      clearInterval(timer);
      timer = null;
    }
  };
}

function isoTime(at) {
  const date = new Date(at * 1000);
  return Number.isNaN(date.getTime()) ? undefined : date.toISOString();
}
