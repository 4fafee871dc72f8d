// Reads one turn from the API.
import { address, inPath, request } from "../../../lib/api.js";
import { parseExact } from "./exact_json.js";

/** The URL of a turn with the parts that are named ("messages,times"). `turn`: an id or a number. */
export function turnUrl(sessionId, turn, include) {
  const url = address(`rl/sessions/${inPath(sessionId)}/interactions/${encodeURIComponent(turn)}`);
  url.searchParams.set("include", include);
  return url;
}

/** The turn as the API gives it, large integers as they are written there. */
export const readTurn = async (sessionId, turn, include, options) =>
  parseExact(await (await request(turnUrl(sessionId, turn, include), options)).text());
