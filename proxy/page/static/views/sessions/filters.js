// What the address of the list says, as the filter of `GET /rl/sessions`. Pure: no DOM, no network.

import { conditionsOf } from "./conditions.js";
import { NEWEST } from "./order.js";

export const STATUSES = ["active", "ended", "expired"];
export const PURPOSES = ["main", "title", "summary", "subagent", "aux"];

/** The names of the address's query that select sessions, by where the bar has their fields: always, below, or in a part that opens. */
const ALWAYS = ["search", "text", "status"];
export const OFTEN = ["group", "task", "purpose", "forked", "reward_min", "reward_max", "version_min", "version_max"];
export const FURTHER = [
  "turns_min", "turns_max", "tokens_min", "tokens_max", "lasted_min", "lasted_max", "metadata", "trained", "validation", "withdrawn",
];
export const FILTERS = [...ALWAYS, ...OFTEN, ...FURTHER];

/** The `filter` of a query, as an object. A number that cannot be read goes on as text: the server says what is wrong with it. */
export function filterOf(query) {
  const filter = {
    search: query.search,
    text: query.text,
    status: query.status,
    group_id: query.group,
    task_id: query.task,
    purpose: query.purpose,
    ...forks(query.forked),
    reward: range(query.reward_min, query.reward_max),
    version: range(query.version_min, query.version_max),
    turns: range(query.turns_min, query.turns_max),
    tokens: range(query.tokens_min, query.tokens_max),
    duration: range(query.lasted_min, query.lasted_max),
    metadata: query.metadata?.trim() ? (conditionsOf(query.metadata) ?? query.metadata) : undefined,
    trained_in: query.trained,
    validation: query.validation,
    withdrawn: ANSWERS[query.withdrawn] ?? query.withdrawn,
  };
  return Object.fromEntries(Object.entries(filter).filter(([, value]) => value !== undefined && value !== ""));
}

/** The order of a query: newest first, unless it says otherwise. */
export const orderOf = (query) => query.order || NEWEST;

/** How many of the first rows a query asks for, such as the ten worst; null: all. */
export const firstOf = (query) => (/^[1-9]\d{0,3}$/.test(query.first ?? "") ? Number(query.first) : null);

/** How many filters a query has. A range counts once. */
export const filterCount = (query) => Object.keys(filterOf(query)).length;

/** The query without its filters. */
export const withoutFilters = (query) => Object.fromEntries(Object.entries(query).filter(([name]) => !FILTERS.includes(name)));

/** The number of sessions that a filter selects, out of the server's counts by status; null if it cannot count them. */
export function totalOf(counts, status) {
  if (!counts) return null;
  return status ? (counts[status] ?? null) : Object.values(counts).reduce((sum, count) => sum + count, 0);
}

const ANSWERS = { yes: true, no: false };

/** "yes" and "no", or at least so many forks. */
function forks(text) {
  return /^\d+$/.test(text ?? "") ? { forks: { min: Number(text) } } : { forked: ANSWERS[text] ?? text };
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
