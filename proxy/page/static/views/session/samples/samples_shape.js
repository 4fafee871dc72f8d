// What an outline of a sample says: how many tokens are what, pieces of a bar, and why tokens are not trained. Pure.

export const KINDS = ["prompt", "context", "trained", "sampled", "padding"];

/** The numbers of tokens by kind: {prompt: 25, trained: 3, ...}; kinds without a token are 0. */
export function countsOf({ runs }) {
  const counts = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
  for (const [start, end, kind] of runs) counts[kind] = (counts[kind] ?? 0) + end - start;
  return counts;
}

/**
 * A sample as pieces of a bar that is `width` pixels long for `scale` tokens: {start, end, kind, turn, x, width}.
 * What is narrower than a pixel is joined with its neighbours, under the kind that has the most tokens of them.
 */
export function piecesOf({ runs }, width, scale) {
  const pixel = Math.max(scale, 1) / width, pieces = [];
  let open = null;
  for (const [start, end, kind, turn] of runs) {
    const thin = end - start < pixel;
    if (thin && open && end - open.start <= pixel) open.runs.push({ start, end, kind, turn });
    else pieces.push((open = { start, runs: [{ start, end, kind, turn }] }));
    if (!thin) open = null;
  }
  return pieces.map(({ start, runs: joined }) => {
    const { kind, turn } = joined.reduce((best, run) => (run.end - run.start > best.end - best.start ? run : best));
    const { end } = joined[joined.length - 1];
    return { start, end, kind, turn, x: start / pixel, width: (end - start) / pixel };
  });
}

/**
 * One entry for each turn of a sample: {id, span, output, trained, untrained: [words]}. `output`: the tokens of its output
 * that the sample has; `untrained`: why those that it does not train are not, as `output_runs` of the session's entry says;
 * "elsewhere" are trained in another sample. `output` is null for a turn that is not in the sample as it was sampled.
 */
export function turnsOf(sample, outputRuns = {}) {
  const trained = new Map(), missed = new Map();
  for (const [start, end, kind, turn] of sample.runs) {
    if (kind === "trained") trained.set(turn, (trained.get(turn) ?? 0) + end - start);
    if (kind === "sampled") missed.set(turn, (missed.get(turn) ?? 0) + end - start);
  }
  return sample.turns.map(({ interaction_id: id, span }, at) => {
    const reasons = [...new Set((outputRuns[id] ?? []).map(([, , reason]) => reason))];
    const why = reasons.filter((reason) => reason !== null);
    const untrained = missed.get(at) || !span ? (why.length ? why : ["elsewhere"]) : [];
    return { id, span, output: span ? span[1] - span[0] : null, trained: trained.get(at) ?? 0, untrained };
  });
}

/** The samples and the entry of one session, of an answer that may have those of its whole group. */
export function ofSession(answer, sessionId) {
  return {
    samples: answer.samples.filter((sample) => sample.session_id === sessionId),
    entry: answer.sessions.find((entry) => entry.session_id === sessionId),
    compared: answer.sessions.length,
  };
}
