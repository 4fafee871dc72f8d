// The keys of metadata and metrics that sessions have, as names of values: "metadata.step". Pure: no DOM.
import { orderFrom, valueOf } from "./order.js";

const MOST = 30;
const STEP = "metadata.step";

/** The keys of entries that have a value to sort by, in order of their names, and that of the order. At most 30. */
export function keysOf(rows, order) {
  const found = new Set();
  for (const row of rows) {
    for (const of of ["metadata", "metrics"]) {
      for (const key of Object.keys(row[of] ?? {})) if (found.size < MOST && valueOf(row, `${of}.${key}`) !== undefined) found.add(`${of}.${key}`);
    }
  }
  const { name } = orderFrom(order);
  if (name.includes(".")) found.add(name);
  return [...found].sort();
}

/** The keys that have a column: the step, if it is known, and that of the order. */
export const columnKeys = (keys, order) => keys.filter((key) => key === STEP || key === orderFrom(order).name);
