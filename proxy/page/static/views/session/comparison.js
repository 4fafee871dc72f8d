// What a turn differs in from the turn that it is nearest to, as the API says it: read when it is shown.
import { get, inPath } from "../../lib/api.js";
import { useEffect, useState } from "../../lib/html.js";
import { useLoad } from "../../lib/load.js";
import { isCompared } from "./tree/tree_words.js";

const SETTLED_MS = 150;

/** The comparison of a turn (docs/http-api.md), as `useLoad` returns it: {data, error, reload}. */
export function useComparison(sessionId, id) {
  const path = `/rl/sessions/${inPath(sessionId)}/interactions/${encodeURIComponent(id)}`;
  return useLoad(async ({ signal }) => (await get(path, { include: "compared" }, { signal })).compared, [path]);
}

/**
 * The id of the turn that a fork is nearest to; null if the node is no fork, has none, or nobody knows it yet. It is asked
 * for once the node has stayed for a moment.
 */
export function useNearest(sessionId, node) {
  const id = node && isCompared(node) ? node.interaction_id : null;
  const [found, setFound] = useState({ id: null, nearest: null });
  useEffect(() => {
    if (id === null) return undefined;
    const control = new AbortController();
    const path = `/rl/sessions/${inPath(sessionId)}/interactions/${encodeURIComponent(id)}`;
    const ask = () =>
      get(path, { include: "compared" }, { signal: control.signal }).then(
        ({ compared }) => setFound({ id, nearest: compared.nearest?.interaction_id ?? null }),
        () => null, // the line is an addition; what failed is said where the turn is shown
      );
    const timer = setTimeout(ask, SETTLED_MS);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [sessionId, id]);
  return found.id === id ? found.nearest : null;
}
