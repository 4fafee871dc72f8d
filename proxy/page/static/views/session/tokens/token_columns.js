// Reads what was recorded beside tokens, in pages around the token that somebody looks at. A few pages are held.
import { get } from "../../../lib/api.js";
import { useEffect, useMemo, useState } from "../../../lib/html.js";

/** Tokens of a page. */
export const PAGE = 64;
const MOST_PAGES = 32;
/** Who moves the pointer across many pages reads none of them. */
const PAUSE_MS = 80;

/**
 * The page with token `at`: {columns, error}, of which one is set; undefined while it is read, and where nothing was
 * recorded. `path`: of the turn; `tokens`: of the turn, another object whenever it was read.
 */
export function useColumns({ path, tokens, at }) {
  const pages = useMemo(() => new Map(), [path, tokens]);
  const [, setRead] = useState(0);
  const start = Math.floor(at / PAGE) * PAGE;
  useEffect(() => {
    if (tokens.recorded.length === 0 || pages.get(start)?.columns) return undefined;
    const control = new AbortController();
    const keep = (page) => {
      if (control.signal.aborted) return;
      pages.delete(start);
      if (pages.size >= MOST_PAGES) pages.delete(pages.keys().next().value);
      pages.set(start, page);
      setRead((times) => times + 1);
    };
    const { drift } = tokens.export;
    const read = () => get(path, { include: "columns", drift, start, limit: PAGE }, { signal: control.signal })
      .then(({ columns }) => keep({ columns }), (error) => keep({ error }));
    const timer = setTimeout(read, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      control.abort();
    };
  }, [pages, start]);
  return pages.get(start);
}
