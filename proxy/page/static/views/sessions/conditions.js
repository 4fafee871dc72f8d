// Conditions on metadata as people write them: "step>=3, env=sokoban, name=\"a, b\"". Pure: no DOM.

const ONE = /^\s*([^<>=,"]+?)\s*(>=|<=|=)\s*(.*?)\s*$/s;
const ENDS = { ">=": "min", "<=": "max" };

/**
 * The `metadata` of a filter: {step: {min: 3}, env: "sokoban"}; null if the text cannot be read. Values are JSON, else text;
 * one with a comma is JSON in quotes. A key with several values takes any of them.
 */
export function conditionsOf(text) {
  const found = new Map();
  for (const part of parts(text)) {
    const [, key, sign, given] = ONE.exec(part) ?? [];
    if (key === undefined || (sign !== "=" && typeof valueOf(given) !== "number")) return null;
    const known = found.get(key) ?? { values: [], range: {} };
    if (sign === "=") known.values.push(valueOf(given));
    else known.range[ENDS[sign]] = valueOf(given);
    found.set(key, known);
  }
  const conflicts = ({ values, range }) => values.length > 0 && Object.keys(range).length > 0;
  if ([...found.values()].some(conflicts)) return null;
  return Object.fromEntries([...found].map(([key, { values, range }]) => [key, values.length > 1 ? values : values.length ? values[0] : range]));
}

/** A condition as text: ["step", 12] is "step=12". A text that would be read as something else is in quotes. */
export function conditionText(key, value) {
  const plain = typeof value === "string" && valueOf(value) === value && !/[,"]|^\s|\s$|^$/.test(value);
  return `${key}=${plain ? value : JSON.stringify(value)}`;
}

function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** The parts between commas; those within quotes separate nothing. */
function parts(text) {
  const found = text.match(/(?:"(?:[^"\\]|\\.)*"|[^,])+/gs) ?? [];
  return found.filter((part) => part.trim() !== "");
}
