// The words and numbers of what trainers told. Pure: no DOM.

/** A KL divergence with three digits: "0.00041", "1.2×10⁻⁷", "–" without one. */
export function kl(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value >= 1e-4) return Number(value.toPrecision(3)).toString();
  const [digits, power] = value.toExponential(1).split("e-");
  return `${digits}×10⁻${[...power].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)]).join("")}`;
}

/** A ratio of probabilities: "1.04", "5.2e+8", "–" without one. */
export const ratio = (value) => (value === null || value === undefined ? "–" : value < 1e4 ? value.toPrecision(3) : value.toExponential(1));

/** What sampled tokens, in words: the server, its dtype and quantisation. */
export function samplerName({ server, dtype, quantization }) {
  const of = [dtype, quantization].filter(Boolean).join(" ");
  return `${server || "the engine of the server"}${of ? ` (${of})` : ""}`;
}

/** The trainers of steps, the one that told last first. */
export function trainersOf(steps) {
  const last = new Map();
  for (const { trainer, noted_at } of steps) last.set(trainer, Math.max(last.get(trainer) ?? 0, noted_at));
  return [...last].sort((one, other) => other[1] - one[1] || one[0].localeCompare(other[0])).map(([trainer]) => trainer);
}

/** A function from names to the data of a chart: [steps, values of each name], by step. */
export function charted(steps) {
  const inOrder = [...steps].sort((one, other) => one.step - other.step);
  const of = { trained: (each) => each.tokens - each.masked };
  return (...names) => [inOrder.map((each) => each.step), ...names.map((name) => inOrder.map((each) => (of[name] ?? ((step) => step[name]))(each)))];
}

/** The sums of a turn over its parts: {tokens, masked, clipped, kl, largest_ratio}. */
export function summed(parts) {
  const sum = (name) => parts.reduce((total, part) => total + part[name], 0);
  const told = parts.filter((part) => part.compared > 0);
  const compared = told.reduce((total, part) => total + part.compared, 0);
  return {
    tokens: sum("tokens"), masked: sum("masked"), clipped: sum("clipped"),
    kl: compared ? told.reduce((total, part) => total + part.kl * part.compared, 0) / compared : null,
    largest_ratio: compared ? Math.max(...told.map((part) => part.largest_ratio)) : null,
  };
}
