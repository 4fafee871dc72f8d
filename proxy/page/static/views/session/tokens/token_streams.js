// Reads what trainers told of the tokens of a path, one stream at a time.
import { get, inPath } from "../../../lib/api.js";
import { useMemo } from "../../../lib/html.js";
import { useLoad } from "../../../lib/load.js";
import { byToken, streams } from "./stream_bands.js";

/**
 * {choices, chosen, values, error}: the streams of the turns of the path, newest step first; the one that the address
 * names, or null; and its values by token, null where it has none. `values` is null until they are read.
 */
export function useStreams({ sessionId, tokens, named }) {
  const path = `rl/sessions/${inPath(sessionId)}/annotations`;
  const known = useLoad(({ signal }) => get(path, {}, { signal }), [path, tokens], { keep: true });
  const choices = useMemo(() => streams(known.data?.turns ?? [], tokens.parts), [known.data, tokens]);
  const chosen = choices.find(({ key }) => key === named) ?? null;
  const asked = chosen && { trainer: chosen.trainer, step: chosen.step, stream: chosen.stream };
  const read = useLoad(({ signal }) => (asked ? get(path, asked, { signal }) : Promise.resolve(null)), [path, chosen?.key, tokens]);
  const values = useMemo(() => (chosen && read.data ? byToken(read.data.values, tokens) : null), [read.data, chosen?.key, tokens]);
  return { choices, chosen, values, error: known.error ?? read.error };
}
