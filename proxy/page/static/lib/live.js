// Whether the page is live. The view that listens to the server says so; the header shows it.
import { useEffect, useState } from "./html.js";

let now = { state: "off", detail: "" };
const listeners = new Set();

/** `state`: "on" (news arrive), "lost" (the connection broke, and is tried again), "off" (this view does not listen). */
export function setLive(state, detail = "") {
  if (state === now.state && detail === now.detail) return;
  now = { state, detail };
  listeners.forEach((listener) => listener(now));
}

/** {state, detail}, kept up to date. */
export function useLive() {
  const [live, set] = useState(now);
  useEffect(() => {
    listeners.add(set);
    set(now);
    return () => listeners.delete(set);
  }, []);
  return live;
}
