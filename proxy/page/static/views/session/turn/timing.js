// How the time of a turn was spent, from the times that the API has. Pure: no DOM.

const LEAST_S = 0.01; // an answer that came in one piece took less: its tokens were not sampled in that time

/**
 * {total, wait, sampling, rate} in seconds and tokens a second. `wait`: from the request to the first token, which
 * includes queues and the reading of the prompt. `sampling`: from the first token to the last. `rate` is null where the answer came in one piece. Null where unknown.
 */
export function timing(times, outputTokens) {
  const { created_at: begun, first_token_at: first, completed_at: end } = times;
  const total = between(begun, end);
  const wait = between(begun, first);
  const sampling = between(first, end);
  const rate = sampling !== null && sampling >= LEAST_S && outputTokens > 1 ? (outputTokens - 1) / sampling : null;
  return { total, wait, sampling, rate };
}

const between = (from, to) => (from === null || from === undefined || to === null || to === undefined ? null : Math.max(0, to - from));
