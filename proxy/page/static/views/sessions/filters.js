// What the address of the list says, as the filter of `GET /rl/sessions`. Pure: no DOM, no network.

export const STATUSES = ["active", "ended", "expired"];
export const PURPOSES = ["main", "title", "summary", "subagent", "aux"];

/** The names of the address's query that select sessions. */
export const FILTERS = [
  "search", "status", "group", "task", "purpose", "forked", "reward_min", "reward_max", "version_min", "version_max",
];

/** The `filter` of a query, as an object. A number that cannot be read goes on as text: the server says what is wrong with it. */
export function filterOf(query) {
  const filter = {
    search: query.search,
    status: query.status,
    group_id: query.group,
    task_id: query.task,
    purpose: query.purpose,
    forked: { yes: true, no: false }[query.forked] ?? query.forked,
    reward: range(query.reward_min, query.reward_max),
    version: range(query.version_min, query.version_max),
  };
  return Object.fromEntries(Object.entries(filter).filter(([, value]) => value !== undefined && value !== ""));
}

/** The order of a query: newest first, unless it says otherwise. */
export const orderOf = (query) => query.order || "newest";

/** How many filters a query has. A range counts once. */
export const filterCount = (query) => Object.keys(filterOf(query)).length;

/** The query without its filters. */
export const withoutFilters = (query) => Object.fromEntries(Object.entries(query).filter(([name]) => !FILTERS.includes(name)));

/** The number of sessions that a filter selects, out of the server's counts by status; null if it cannot count them. */
export function totalOf(counts, status) {
  if (!counts) return null;
  return status ? (counts[status] ?? null) : Object.values(counts).reduce((sum, count) => sum + count, 0);
}

function range(min, max) {
  const ends = { min: numeric(min), max: numeric(max) };
  const given = Object.entries(ends).filter(([, value]) => value !== undefined);
  return given.length ? Object.fromEntries(given) : undefined;
}

function numeric(text) {
  if (text === undefined || text.trim() === "") return undefined;
  const value = Number(text);
  return Number.isFinite(value) ? value : text;
}
