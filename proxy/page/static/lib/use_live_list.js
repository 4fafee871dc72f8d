// The hook that views use a live list with.
import { useLive, useSessionChanges } from "./events.js";
import { useCallback, useEffect, useRef, useState } from "./html.js";

const POLL_MS = 10_000; // while no news arrive
const EMPTY = { rows: [], cursor: null, counts: null, error: null, loading: true, loaded: false };

/**
 * The state of a list that `make(state, show)` makes, anew whenever `asked` (a string) changes: {rows, counts, error,
 * loading, loaded, whole, more(), reload()}. `loaded`: the first page came. `whole`: there are no more rows.
 */
export function useLiveList(asked, make) {
  const [state, setState] = useState({ ...EMPTY, asked });
  const list = useRef(null);
  useEffect(() => {
    setState({ ...EMPTY, asked });
    list.current = make({ ...EMPTY }, (next) => setState({ ...next, asked }));
    list.current.more();
    return () => list.current.close();
  }, [asked]);
  useSessionChanges((news) => list.current?.take(news));
  usePolling(useLive(), list);
  const more = useCallback(() => list.current?.more(), []);
  const reload = useCallback(() => list.current?.retry(), []);
  const now = state.asked === asked ? state : EMPTY;
  return { ...now, whole: now.loaded && now.cursor === null, more, reload };
}

function usePolling(live, list) {
  useEffect(() => {
    if (live !== "reconnecting") return undefined;
    const timer = setInterval(() => list.current?.take({ changed: [], all: true }), POLL_MS);
    return () => clearInterval(timer);
  }, [live]);
}
