// Whether the window is narrow, where styles say so: lists then are cards.
import { useEffect, useState } from "./html.js";

const NARROW = "(max-width: 640px)";

/** Whether the window is narrow now. */
export function useNarrow() {
  const [narrow, setNarrow] = useState(() => matchMedia(NARROW).matches);
  useEffect(() => {
    const query = matchMedia(NARROW);
    const changed = () => setNarrow(query.matches);
    query.addEventListener("change", changed);
    changed();
    return () => query.removeEventListener("change", changed);
  }, []);
  return narrow;
}
