// The title of the window: what the view shows, then the name of the page. Screen readers say it on a change.
import { useEffect } from "./html.js";
import { printable } from "./printable.js";

/** Called by each view. `text`: "Sessions", or "Session math-3". */
export function useTitle(text) {
  useEffect(() => {
    document.title = text ? `${printable(text, { line: true })} · Tokengrove` : "Tokengrove";
  }, [text]);
}
