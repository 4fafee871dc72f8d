// Orders of the list, as `order` of `GET /rl/sessions` says them: "newest", "reward", "-metadata.step". Pure: no DOM.

export const NEWEST = "newest";
const LONGEST_TEXT = 200; // by which the server compares texts

const VALUES = {
  reward: ["lowest reward", "highest reward", ({ summary }) => summary.score],
  turns: ["fewest turns", "most turns", ({ summary }) => summary.turns],
  forks: ["fewest forks", "most forks", ({ summary }) => summary.forks],
  lost: ["fewest lost calls", "most lost calls", ({ summary }) => summary.failed + summary.aborted],
  tokens: ["fewest tokens", "most tokens", ({ summary }) => summary.prompt_tokens + summary.output_tokens],
  prompt_tokens: ["fewest prompt tokens", "most prompt tokens", ({ summary }) => summary.prompt_tokens],
  output_tokens: ["fewest sampled tokens", "most sampled tokens", ({ summary }) => summary.output_tokens],
  duration: ["shortest", "longest", (entry) => lastedS(entry)],
};

/** Seconds from the start of a session to its end, or to the last change. */
export const lastedS = (entry) => (entry.ended_at ?? entry.summary.last_at) - entry.created_at;

/** {name, descending} of an order. Its name is "created" for the orders of creation. */
export function orderFrom(text) {
  if (text === NEWEST || text === "oldest") return { name: "created", descending: text === NEWEST };
  return text.startsWith("-") ? { name: text.slice(1), descending: true } : { name: text, descending: false };
}

/** Whether an order is that of a value: the server then sorts no more than so many sessions. */
export const isByValue = (text) => orderFrom(text).name !== "created";

/** The order after a click on a heading: the greatest first, and then the other way round. */
export function clicked(text, name) {
  const order = orderFrom(text);
  const descending = order.name === name ? !order.descending : true;
  if (name === "created") return descending ? NEWEST : "oldest";
  return descending ? `-${name}` : name;
}

/** Orders to choose from, with words. `keys`: names of further values, such as "metadata.step". */
export function choices(keys) {
  const known = Object.entries(VALUES).flatMap(([name, [up, down]]) => [[name, up], [`-${name}`, down]]);
  const keyed = keys.flatMap((name) => [[name, `${name}, upwards`], [`-${name}`, `${name}, downwards`]]);
  return [[NEWEST, "newest first"], ["oldest", "oldest first"], ...known, ...keyed];
}

/** The value of an entry with its summary; undefined for what is sorted last. */
export function valueOf(entry, name) {
  const own = Object.hasOwn(VALUES, name) ? VALUES[name][2](entry) : keyedValue(entry, name);
  return ["number", "string", "boolean"].includes(typeof own) ? own : undefined;
}

function keyedValue(entry, name) {
  const [, of, key] = /^(metadata|metrics)\.(.+)$/s.exec(name) ?? [];
  return of && Object.hasOwn(entry[of], key) ? entry[of][key] : undefined;
}

/** A function that compares entries as the server does: negative if the first comes first. */
export function comparing(text) {
  const { name, descending } = orderFrom(text);
  const way = descending ? -1 : 1;
  if (name === "created") return (one, other) => way * (one.created_at - other.created_at);
  const byCreation = (one, other) => one.created_at - other.created_at || compared(one.session_id, other.session_id);
  return (one, other) => {
    const [first, second] = [valueOf(one, name), valueOf(other, name)];
    if (first === undefined || second === undefined) return (first === undefined) - (second === undefined) || byCreation(one, other);
    return way * (KINDS[typeof first] - KINDS[typeof second] || compared(cut(first), cut(second))) || byCreation(one, other);
  };
}

const KINDS = { number: 0, string: 1, boolean: 2 };
const cut = (value) => (typeof value === "string" ? value.slice(0, LONGEST_TEXT) : value);
const compared = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
