// Loading what a view shows: what was asked for before is given up, and old data stays while newer is on its way.
import { useCallback, useEffect, useState } from "./html.js";

const NOTHING = { data: undefined, error: null, loading: true };

/**
 * Load data whenever one of `needs` changes.
 *
 * `load({signal})` returns a promise. Returns {data, error, loading, reload}: `data` is undefined until the first
 * answer and whenever `needs` changed; with `keep` it stays until the next answer. `error` is that of the last try.
 */
export function useLoad(load, needs, { keep = false } = {}) {
  const [state, setState] = useState(NOTHING);
  const [again, setAgain] = useState(0);
  const reload = useCallback(() => setAgain((count) => count + 1), []);
  useEffect(() => setState((old) => (keep ? { ...old, loading: true } : NOTHING)), needs);
  useEffect(() => {
    const control = new AbortController();
    const settle = (next) => control.signal.aborted || setState((old) => ({ ...old, ...next, loading: false }));
    setState((old) => ({ ...old, loading: true }));
    Promise.resolve(load({ signal: control.signal })).then(
      (data) => settle({ data, error: null }),
      (error) => settle({ error }),
    );
    return () => control.abort();
  }, [...needs, again]);
  return { ...state, reload };
}
