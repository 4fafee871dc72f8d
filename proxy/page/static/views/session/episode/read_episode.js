// What the turns of a session brought: read in one request, then each new turn by itself. It never changes.
import { get, inPath } from "../../../lib/api.js";
import { useMemo, useRef } from "../../../lib/html.js";
import { useLoad } from "../../../lib/load.js";

const FEW = 4; // new turns that are read one by one

/** What `useLoad` returns; its `data` is a Map by interaction id of {messages, output}. `nodes`: of the session. */
export function useAdded(sessionId, nodes) {
  const ids = useMemo(() => nodes.filter(({ status }) => status !== "running").map((node) => node.interaction_id), [nodes]);
  const kept = useRef({ sessionId, added: new Map() });
  const load = async ({ signal }) => {
    if (kept.current.sessionId !== sessionId) kept.current = { sessionId, added: new Map() };
    const { added } = kept.current;
    const missing = ids.filter((id) => !added.has(id));
    const all = added.size === 0 || missing.length > FEW;
    const found = all ? await readAll(sessionId, signal) : await Promise.all(missing.map((id) => readOne(sessionId, id, signal)));
    const whole = new Map([...added, ...found.map((turn) => [turn.interaction_id, turn.added])]);
    if (!signal.aborted) kept.current = { sessionId, added: whole };
    return whole;
  };
  return useLoad(load, [sessionId, ids.length], { keep: true });
}

const readAll = async (sessionId, signal) => (await get(`/rl/sessions/${inPath(sessionId)}`, { include: "added" }, { signal })).interactions;

const readOne = (sessionId, id, signal) =>
  get(`/rl/sessions/${inPath(sessionId)}/interactions/${encodeURIComponent(id)}`, { include: "added" }, { signal });
