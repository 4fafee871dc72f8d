// The rows of the list as pages and news change them. Pure: no DOM, no network. Entries are those of
// `GET /rl/sessions`, or of `GET /rl/groups`.
import { comparing } from "./order.js";

/** Entries after which come those of the next page. An entry that is there already is replaced where it stands. */
export function appended(rows, page, keyOf = idOf) {
  const known = new Map(page.map((entry) => [keyOf(entry), entry]));
  const kept = rows.map((row) => taken(known, keyOf(row)) ?? row);
  return [...kept, ...known.values()];
}

/**
 * The first `wanted` entries, or all: {rows, cursor, first}. A page of the server may be short, or empty, while its cursor
 * goes on. `read(limit, cursor)` returns a page as {rows, cursor}; `first`: the first page.
 */
export async function gathered(wanted, read) {
  let [rows, cursor, first] = [[], null, null];
  do {
    const page = await read(wanted - rows.length, cursor);
    first ??= page;
    [rows, cursor] = [[...rows, ...page.rows], page.cursor];
  } while (cursor !== null && rows.length < wanted);
  return { rows, cursor, first };
}

/**
 * Rows whose beginning was read again as `page`: {rows, rest}. What followed the last row that is on both stays; `rest`:
 * whether any did. If nothing is on both, too much is new to tell what lies between, and only the page stays.
 */
export function renewed(rows, page, { whole, keyOf = idOf }) {
  if (whole) return { rows: page, rest: false };
  const there = new Set(page.map(keyOf));
  const last = rows.findLastIndex((row) => there.has(keyOf(row)));
  const older = last < 0 ? [] : rows.slice(last + 1);
  return { rows: [...page, ...older], rest: older.length > 0 };
}

/**
 * Rows after `asked` sessions were read again and `found` of them still match the filter: each of these is where it belongs
 * now, but not beyond what was the last row unless the list is `whole`; the others leave.
 */
export function changed(rows, asked, found, { order, whole }) {
  const compare = comparing(order);
  const gone = new Set(asked);
  const kept = rows.filter((row) => !gone.has(row.session_id));
  const last = rows.at(-1);
  for (const entry of found) {
    const at = kept.findIndex((row) => compare(entry, row) < 0);
    if (at >= 0) kept.splice(at, 0, entry);
    else if (whole || !last || compare(entry, last) <= 0) kept.push(entry);
  }
  return kept;
}

/** At most `most` of `ids`, and no more than an address holds. Returns [chosen, rest]. */
export function portion(ids, most = 50, characters = 3000) {
  const chosen = [];
  let size = 0;
  for (const id of ids) {
    size += encodeURIComponent(JSON.stringify(id)).length + 3;
    if (chosen.length === most || (size > characters && chosen.length > 0)) break;
    chosen.push(id);
  }
  return [chosen, ids.slice(chosen.length)];
}

const idOf = (entry) => entry.session_id;

function taken(map, key) {
  const value = map.get(key);
  map.delete(key);
  return value;
}
