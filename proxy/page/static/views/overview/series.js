// Numbers over time: joined from what was asked for and what came since, and said in words. Pure: no DOM, no clock.

const HOUR = 720; // samples

/** Join two histories (docs/http-api.md, `history`); where both have a sample, that of `newer` holds. At most an hour. */
export function joined(older, newer) {
  if (!older || older.at.length === 0) return newer;
  if (newer.at.length === 0) return older;
  const kept = older.at.findIndex((at) => at >= newer.at[0]);
  const end = kept < 0 ? older.at.length : kept;
  const result = { every_s: newer.every_s };
  for (const [name, values] of Object.entries(newer)) {
    if (Array.isArray(values)) result[name] = [...(older[name] ?? []).slice(0, end), ...values].slice(-HOUR);
  }
  return result;
}

/**
 * What is shown, {now, history}, with statistics that somebody asked for: what came while they were on their way is newer
 * and stays. `now` and `asked`: statistics (docs/http-api.md), `now` null before the first.
 */
export function withAsked({ now, history }, asked) {
  if (now !== null && now.at > asked.at) return { now, history: joined(asked.history, history) };
  return { now: asked, history: joined(history, asked.history) };
}

/**
 * The last `seconds` before `now` of the named numbers: [times, values, values, ...], as charts need them.
 * Where the server was not running there is a gap: a moment whose values are null.
 */
export function lately(history, names, seconds, now) {
  const rows = [[], ...names.map(() => [])];
  let before = null;
  history.at.forEach((at, index) => {
    if (at <= now - seconds) return;
    if (before !== null && at - before > history.every_s * 1.5) {
      rows[0].push(before + history.every_s);
      names.forEach((_, place) => rows[place + 1].push(null));
    }
    rows[0].push(at);
    names.forEach((name, place) => rows[place + 1].push(history[name][index] ?? null));
    before = at;
  });
  return rows;
}

/** The last value that is known, its highest and their mean; null for each without values. */
export function summary(values) {
  const known = values.filter((value) => value !== null);
  if (known.length === 0) return { last: null, most: null, mean: null };
  const most = known.reduce((a, b) => Math.max(a, b));
  return { last: known.at(-1), most, mean: known.reduce((a, b) => a + b, 0) / known.length };
}

/** A chart in words: "turns: now 3.2, highest 5, mean 1.2; failed: no values". `format` writes a value. */
export function inWords(series, format) {
  return series
    .map(({ label, values }) => {
      const { last, most, mean } = summary(values);
      return last === null ? `${label}: no values` : `${label}: now ${format(last)}, highest ${format(most)}, mean ${format(mean)}`;
    })
    .join("; ");
}

/** Every `step`-th row of a chart's data, the newest first and surely among them: [[x, value, ...], ...] for a table. */
export function rows([times, ...values], most = 60) {
  const step = Math.max(1, Math.ceil(times.length / most));
  const found = [];
  for (let index = times.length - 1; index >= 0; index -= step) found.push([times[index], ...values.map((each) => each[index])]);
  return found;
}

/** Counts as bars, the largest first: [{name, count, share}]; `share` of the largest, from 0 to 1. Without those of 0. */
export function bars(counts, without = []) {
  const found = Object.entries(counts).filter(([name, count]) => count > 0 && !without.includes(name));
  const largest = Math.max(...found.map(([, count]) => count), 1);
  return found.sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([name, count]) => ({ name, count, share: count / largest }));
}

/**
 * How uPlot asks for the range of x: from the first to the last; a single one has `room` on both sides. Of a single one
 * uPlot makes a range of its own before it asks: a day, or up to 100.
 */
export const apart = (room) => ({ data: [x] }, first, last) => (x.length === 1 ? [x[0] - room, x[0] + room] : [first, last]);

/** The numbers of a chart as CSV. `heading`: of the first column; `labels`: of the others. */
export function csv(heading, labels, [at, ...values]) {
  const rows = at.map((x, index) => [x, ...values.map((each) => each[index] ?? "")]);
  return [[heading, ...labels], ...rows].map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
}

// A spreadsheet takes a text that begins with one of these for a formula.
const FORMULA = /^[=+\-@\t\r]/;

function quoted(value) {
  if (typeof value === "number") return String(value);
  const text = FORMULA.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
