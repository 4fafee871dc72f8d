// Filters that the reader has named: each is an address of the list, kept by this browser. `storage`: localStorage, or like it.

const KEY = "tokengrove-filters";
const MOST = 50;

/** The saved filters, in order of their names: [{name, query}]. What cannot be read is none. */
export function savedFilters(storage = localStorage) {
  try {
    const found = JSON.parse(storage.getItem(KEY) ?? "[]");
    return found.filter(({ name, query }) => typeof name === "string" && isQuery(query)).sort((one, other) => one.name.localeCompare(other.name));
  } catch {
    return [];
  }
}

/** Save a query under a name, in place of one that has it. Returns whether the browser keeps it. */
export function saveFilter(name, query, storage = localStorage) {
  const others = savedFilters(storage).filter((each) => each.name !== name);
  return others.length < MOST && kept([...others, { name, query }], storage);
}

/** Forget a filter. Returns whether the browser does. */
export const forgetFilter = (name, storage = localStorage) => kept(savedFilters(storage).filter((each) => each.name !== name), storage);

function kept(filters, storage) {
  try {
    if (filters.length) storage.setItem(KEY, JSON.stringify(filters));
    else storage.removeItem(KEY);
    return true;
  } catch {
    return false; // storage is blocked, or full
  }
}

const isQuery = (query) => typeof query === "object" && query !== null && Object.values(query).every((value) => typeof value === "string");
