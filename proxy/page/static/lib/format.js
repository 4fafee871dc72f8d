// Numbers, times and ids as people read them. Pure: no DOM, and no clock but the one that is given.

const MISSING = "–";
const exact = new Intl.NumberFormat("en-US", { maximumFractionDigits: 3 });

/** 12345.678 as "12,345.678"; "–" for null, undefined and what is no number. */
export const number = (value) => (isNumber(value) ? minus(exact.format(value)) : MISSING);

/** 12345 as "12.3k", 1_200_000 as "1.2M": three digits that matter. For tokens and counts; put `number(value)` in the title. */
export function compact(value) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  for (const [limit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= limit * 0.9995) return minus(trimmed(value / limit, size >= limit * 99.95 ? 0 : 1)) + letter;
  }
  return minus(Number.isInteger(value) ? String(value) : trimmed(value, size >= 10 ? 1 : 2));
}

/** A reward, return or score: up to three decimals, with a real minus sign: -0.5 as "−0.5". */
export const reward = (value) => (isNumber(value) ? minus(trimmed(value, 3)) : MISSING);

/** A logprob: always two decimals, so that columns line up. */
export const logprob = (value) => (isNumber(value) ? minus(value.toFixed(2)) : MISSING);

/** 0.123 as "12.3%". */
export const percent = (share) => (isNumber(share) ? `${minus(trimmed(share * 100, 1))}%` : MISSING);

/** Seconds as "8 ms", "1.2 s", "3 min 5 s", "2 h 4 min", "3 d 4 h". */
export function duration(seconds) {
  if (!isNumber(seconds)) return MISSING;
  const size = Math.abs(seconds);
  if (size < 0.0995) return minus(`${trimmed(seconds * 1000, size < 0.00995 ? 1 : 0)} ms`);
  if (size < 9.95) return minus(`${trimmed(seconds, size < 0.995 ? 2 : 1)} s`);
  if (size < 59.5) return minus(`${Math.round(seconds)} s`);
  const [large, small, inLarge, inSmall] = unitsOf(size);
  const count = Math.round(size / inSmall);
  const [whole, rest] = [Math.floor(count / (inLarge / inSmall)), count % (inLarge / inSmall)];
  return `${seconds < 0 ? "−" : ""}${whole} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

/** How long ago `at` was at `now` (both Unix seconds): "now", "12 s", "5 min", "3 h", "2 d". Later than now is "now". */
export function age(at, now) {
  if (!isNumber(at)) return MISSING;
  const seconds = Math.max(0, now - at);
  if (seconds < 1) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400 * 2) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** Unix seconds as "2026-11-23 04:05:06" in the reader's time zone. */
export function when(at) {
  if (!isNumber(at)) return MISSING;
  const date = new Date(at * 1000);
  if (Number.isNaN(date.getTime())) return MISSING;
  const two = (part) => String(part).padStart(2, "0");
  const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join("-");
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** Bytes as "812 B", "1.2 kB", "3.4 MB". */
export function bytes(count) {
  if (!isNumber(count)) return MISSING;
  if (count < 1000) return `${count} B`;
  for (const [limit, unit] of [[1e9, "GB"], [1e6, "MB"]]) if (count >= limit * 0.99995) return `${trimmed(count / limit, 1)} ${unit}`;
  return `${trimmed(count / 1000, 1)} kB`;
}

/** "1 turn", "2 turns", "1,200 turns". */
export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

/** A text of at most `length` characters (emoji count as one), with "…" in its middle: both ends of an id tell it from others. */
export function shorten(text, length = 24) {
  if (text.length <= length) return text;
  const characters = [...text.slice(0, length + 1), ...text.slice(-length - 1)];
  if (text.length <= 2 * length && [...text].length <= length) return text;
  const tail = Math.floor((length - 1) / 3);
  return `${characters.slice(0, length - 1 - tail).join("")}…${tail ? characters.slice(-tail).join("") : ""}`;
}

/** The first `length` characters of a text, with "…" if there are more. For a line of prose. */
export const clip = (text, length) => (text.length <= length ? text : `${[...text.slice(0, length)].slice(0, length - 1).join("")}…`);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const minus = (text) => text.replace(/^-/, "−");
const trimmed = (value, decimals) => String(Number(value.toFixed(decimals)) + 0);

function unitsOf(seconds) {
  if (seconds < 3599.5) return ["min", "s", 60, 1];
  if (seconds < 86370) return ["h", "min", 3600, 60];
  return ["d", "h", 86400, 3600];
}
