// How numbers are distributed: bins, ranges and spreads for drawings. Pure: no DOM.

/** {count, mean, std, min, max} of numbers; std divides by n - 1, null for fewer than two. null without numbers. */
export function spread(values) {
  if (values.length === 0) return null;
  const [min, max] = rangeOf(values);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return { count: values.length, mean, std: values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : null, min, max };
}

/** [least, greatest] of numbers, null without any. */
export const rangeOf = (values) =>
  values.length === 0 ? null : values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

/**
 * Bins of equal width over `range` (default: that of the values), with round edges: [{from, to, count}]. A value on an
 * edge is in the bin above it, the greatest in the last. Equal values are one bin of no width.
 */
export function bins(values, { range = rangeOf(values), most = 20 } = {}) {
  if (!range) return [];
  const [low, high] = range;
  if (low === high) return [{ from: low, to: high, count: values.length }];
  const wanted = Math.min(most, Math.max(10, 2 * Math.ceil(Math.sqrt(values.length))));
  const step = roundStep((high - low) / wanted);
  const first = Math.floor(low / step + 1e-9);
  const count = Math.max(1, Math.ceil(high / step - 1e-9) - first);
  const edge = (index) => Number(((first + index) * step).toPrecision(12));
  const found = Array.from({ length: count }, (_, index) => ({ from: edge(index), to: edge(index + 1), count: 0 }));
  for (const value of values) found[Math.max(0, Math.min(count - 1, Math.floor(value / step + 1e-9) - first))].count += 1;
  return found;
}

/** How many values are in each of `count` equal parts of a range. A range without width has one part. */
export function partsOf(values, [low, high], count) {
  if (low === high) return [values.length];
  const found = Array(count).fill(0);
  for (const value of values) found[Math.min(count - 1, Math.floor(share(value, [low, high]) * count))] += 1;
  return found;
}

/** At most `most` of the numbers, in order, evenly chosen with the first and the last among them. */
export function thinned(values, most) {
  if (values.length <= most) return values;
  return Array.from({ length: most }, (_, index) => values[Math.round((index * (values.length - 1)) / (most - 1))]);
}

/** Where a value stands in a range, from 0 to 1; the middle of a range without width. */
export const share = (value, [low, high]) => (low === high ? 0.5 : (value - low) / (high - low));

/** The least of 1, 2, 2.5 and 5 times a power of ten that is at least `least`. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= least * (1 - 1e-9));
}
