// What the server tells as it happens: one connection for all views of the tab, only while one of them listens and the
// tab is seen. After every connection the views read again what they show: what happened before it is not told.
import { request, address } from "./api.js";
import { backOff, eventParser } from "./event_stream.js";
import { useEffect, useRef, useState } from "./html.js";
import { setLive } from "./live.js";

const SILENT_MS = 40_000; // more than two keep-alives
const LINGER_MS = 1_000; // from one view to the next the connection stays

/** "connecting" | "live" | "reconnecting" | "paused" (the tab is hidden) | "refused" (no key, or a wrong one). */
let state = "paused";
let statistics = null;
let problem = null;
let connection = null;
let lingering = null;
const listeners = new Set();

/** Listen: {state(state, problem), statistics(object), sessions({changed: Set, all})}, each of them optional. Returns how to stop. */
export function listen(listener) {
  listeners.add(listener);
  look();
  return () => {
    listeners.delete(listener);
    clearTimeout(lingering);
    lingering = setTimeout(look, LINGER_MS);
  };
}

/** Whether what is seen is live, kept up to date: see `state`. Listens. */
export function useLive() {
  const [now, setNow] = useState(state);
  useEffect(() => listen({ state: setNow }), []);
  return now;
}

/** The newest statistics (docs/http-api.md), or null before the first. Their `history` is the last minute's. Listens. */
export function useStatistics() {
  const [now, setNow] = useState(statistics);
  useEffect(() => listen({ statistics: setNow }), []);
  return now;
}

/** Calls `changed({changed: Set of session ids, all})` when sessions change; `all`: read everything again. Listens. */
export function useSessionChanges(changed) {
  const latest = useRef(changed);
  latest.current = changed;
  useEffect(() => listen({ sessions: (what) => latest.current(what) }), []);
}

/** Connect again at once: the key has changed, or the reader asks for it. */
export function reconnect() {
  connection?.abort();
  connection = null;
  look();
}

/** Connect if somebody listens and the tab is seen, else leave. */
function look() {
  const wanted = listeners.size > 0 && document.visibilityState === "visible";
  if (wanted && connection === null) {
    connection = new AbortController();
    stay(connection);
  } else if (!wanted && connection !== null) {
    connection.abort();
    connection = null;
    become("paused");
  }
}

document.addEventListener("visibilitychange", look);

/** Connect, and again whenever the connection ends, until aborted. */
async function stay(own) {
  let attempt = 0;
  for (let first = true; !own.signal.aborted; first = false) {
    become(first ? "connecting" : "reconnecting", problem);
    try {
      await read(own, () => {
        attempt = 0;
      });
      problem = null; // the server ended it, as it does at its shutdown
    } catch (error) {
      if (own.signal.aborted) return;
      problem = error;
      if (error.status === 401 || error.status === 403) {
        if (connection === own) connection = null; // the next listener, after a login, connects again
        become("refused", error);
        return;
      }
    }
    if (own.signal.aborted) return;
    become("reconnecting", problem);
    attempt += 1;
    await pause(backOff(attempt, Math.random()) * 1000, own.signal);
  }
}

/** Read one connection to its end. */
async function read(own, connected) {
  const silence = new AbortController();
  const answer = await request(address("/rl/events"), { signal: AbortSignal.any([own.signal, silence.signal]) });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = eventParser();
  connected();
  problem = null;
  become("live");
  tell("sessions", { changed: new Set(), all: true });
  for (;;) {
    const timer = setTimeout(() => silence.abort(), SILENT_MS);
    const { done, value } = await reader.read().finally(() => clearTimeout(timer));
    if (done) return;
    parser.feed(value).forEach(take);
  }
}

function take({ event, data }) {
  const said = JSON.parse(data);
  if (event === "statistics") {
    statistics = said;
    tell("statistics", said);
  } else if (event === "sessions") {
    tell("sessions", { changed: new Set(said.changed), all: said.all });
  }
}

function become(next, why = null) {
  if (next === state) return;
  state = next;
  setLive({ live: "on", reconnecting: "lost" }[next] ?? "off", why?.message ?? "");
  tell("state", next, why);
}

function tell(what, ...said) {
  for (const listener of [...listeners]) listener[what]?.(...said);
}

/** Wait; ends early when aborted. */
const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
