// JSON whose large integers stay as they were written: a seed of 64 bits has more digits than a number of JavaScript. Pure: no DOM.

/**
 * The value of a JSON text. Integers that a number cannot hold become what `JSON.stringify` writes with all their digits;
 * browsers without `JSON.rawJSON` round them.
 */
export const parseExact = (text) => JSON.parse(text, JSON.rawJSON ? exact : undefined);

const exact = (_, value, { source }) =>
  typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(source) ? JSON.rawJSON(source) : value;
