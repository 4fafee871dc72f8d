// Filters that the reader has named: each is an address of the list, kept by this browser. `storage`: as in lib/kept.js.
import { keep, kept } from "../../lib/kept.js";

const KEY = "tokengrove-filters";
const MOST = 50;

/** The saved filters, in order of their names: [{name, query}]. What cannot be read is none. */
export function savedFilters(storage) {
  try {
    const found = JSON.parse(kept(KEY, storage) ?? "[]");
    return found.filter(({ name, query }) => typeof name === "string" && isQuery(query)).sort((one, other) => one.name.localeCompare(other.name));
  } catch {
    return [];
  }
}

/** Save a query under a name, in place of one that has it. Returns whether the browser keeps it. */
export function saveFilter(name, query, storage) {
  const others = savedFilters(storage).filter((each) => each.name !== name);
  return others.length < MOST && write([...others, { name, query }], storage);
}

/** Forget a filter. Returns whether the browser does. */
export const forgetFilter = (name, storage) => write(savedFilters(storage).filter((each) => each.name !== name), storage);

const write = (filters, storage) => keep(KEY, filters.length ? JSON.stringify(filters) : null, storage);

const isQuery = (query) => typeof query === "object" && query !== null && Object.values(query).every((value) => typeof value === "string");
