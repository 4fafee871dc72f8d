// Reads one turn from the API.
import { get, inPath } from "../../../lib/api.js";

/** One turn with the parts that are named ("messages,times"), as the API gives it. `turn`: an id or a number. */
export const readTurn = (sessionId, turn, include, options) =>
  get(`rl/sessions/${inPath(sessionId)}/interactions/${encodeURIComponent(turn)}`, { include }, options);
