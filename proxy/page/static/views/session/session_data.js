// One session as the page shows it, read again when the server says that it has changed.
import { get, inPath } from "../../lib/api.js";
import { useEffect, useMemo, useRef, useState } from "../../lib/html.js";
import { useSessionChanges } from "../../lib/events.js";
import { useLoad } from "../../lib/load.js";
import { nodesOf } from "./tree/tree_layout.js";

const PARTS = "answer,running,score";
const LEAST_MS = 250, POLL_MS = 2000;

/**
 * {tree, nodes, error, reload}: the answer of `GET /rl/sessions/{id}` with its first words, running calls and score, and
 * its interactions with the running calls as nodes. `tree` is undefined until the first answer.
 */
export function useSession(name) {
  const spent = useRef(0);
  const load = async ({ signal }) => {
    const begun = performance.now();
    const tree = await get(`/rl/sessions/${inPath(name)}`, { include: PARTS }, { signal });
    spent.current = performance.now() - begun;
    return tree;
  };
  const { data: tree, error, loading, reload } = useLoad(load, [name]);
  useFollowing(name, tree, loading, spent, reload);
  const nodes = useMemo(() => (tree ? nodesOf(tree) : []), [tree]);
  return { tree, nodes, error, reload };
}

/**
 * Ask again when the session has changed, one request at a time and at most for a tenth of the time; while calls run also
 * every two seconds, since the tokens that they sample are no change.
 */
function useFollowing(name, tree, loading, spent, reload) {
  const [news, setNews] = useState(0);
  const read = useRef(0);
  useSessionChanges(({ changed, all }) => (all || changed.has(name)) && setNews((count) => count + 1));
  useEffect(() => {
    if (loading) return undefined;
    const wait = news !== read.current ? LEAST_MS : tree?.running.some((call) => call.here) ? POLL_MS : null;
    if (wait === null) return undefined;
    const again = () => {
      if (document.visibilityState !== "visible") return;
      read.current = news;
      reload();
    };
    const timer = setTimeout(again, Math.max(wait, 10 * spent.current));
    document.addEventListener("visibilitychange", again);
    return () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", again);
    };
  }, [tree, loading, news]);
}
