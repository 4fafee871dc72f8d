// Two sessions next to each other: their figures, and their conversations message by message. Pure: no DOM.
import { sameBeginning, sameMessage } from "../session/episode/episode_model.js";
import { factsOf } from "../session/session_facts.js";

/**
 * The figures of two sessions as rows {name, values: [one, other], differs}; metadata and metrics have a row for each key.
 * `one`, `other`: {tree, nodes} as `useSession` gives them.
 */
export function figures(one, other) {
  const [first, second] = [one, other].map(figuresOf);
  return [...new Set([...first.keys(), ...second.keys()])].map((name) => {
    const values = [first.get(name) ?? null, second.get(name) ?? null];
    return { name, values, differs: JSON.stringify(values[0]) !== JSON.stringify(values[1]) };
  });
}

function figuresOf({ tree, nodes }) {
  const facts = factsOf(nodes);
  const named = (title, values) => Object.entries(values ?? {}).map(([key, value]) => [`${title} ${key}`, value]);
  return new Map([
    ["score", tree.score], ["status", tree.status], ["outcome", tree.outcome], ["exit reason", tree.exit_reason],
    ["turns", facts.turns], ["forks", facts.forks], ["failed calls", tree.failed], ["sampled tokens", facts.sampled],
    ["longest context", facts.longest], ["duration", tree.ended_at === null ? null : tree.ended_at - tree.created_at],
    ["weight versions", facts.versions === null ? null : [...new Set(facts.versions)].join("–")],
    ["task", tree.task_id], ["group", tree.group_id], ["discount", tree.discount],
    ...named("metric", tree.metrics), ...named("metadata", tree.metadata),
  ]);
}

/**
 * Both conversations from where they part: {same, rows}. `same`: how many messages are equal at the beginning. Rows, turn
 * by turn: {one, other, equal}: entries of `one` and `other`, undefined where a side has no message.
 * @param {{message: object, turn: string}[]} one
 * @param {{message: object, turn: string}[]} other
 */
export function parted(one, other) {
  const same = sameBeginning(one.map(({ message }) => message), other.map(({ message }) => message));
  const [left, right] = [one, other].map((entries) => byTurn(entries.slice(same)));
  const rows = pairs(left, right).flatMap(([mine = [], theirs = []]) => pairs(mine, theirs));
  return { same, rows: rows.map(([mine, theirs]) => ({ one: mine, other: theirs, equal: Boolean(mine && theirs && sameMessage(mine.message, theirs.message)) })) };
}

const pairs = (left, right) => Array.from({ length: Math.max(left.length, right.length) }, (_, at) => [left[at], right[at]]);

function byTurn(entries) {
  const turns = [];
  for (const entry of entries) {
    if (turns.length && turns.at(-1)[0].turn === entry.turn) turns.at(-1).push(entry);
    else turns.push([entry]);
  }
  return turns;
}

/** The messages of turns (of `turnsOf`) in order: {message, turn: the id of the turn that brought it, number: of the turn, place}. */
export const messagesOf = (turns) =>
  turns.flatMap(({ node, places, answer }) => [...places, ...(answer ? [answer] : [])].map((place) => ({ message: place.message, turn: node.interaction_id, number: node.turn, place })));

/** For each of some sessions, the best first: "best" or "worst" if its score is the highest or lowest of several, else "". */
export function ranks(sessions) {
  const scores = sessions.map(({ summary }) => summary.score).filter((score) => score !== null);
  const [most, least] = [scores[0], scores.at(-1)];
  return sessions.map(({ summary: { score } }) => (score === null || most === least ? "" : score === most ? "best" : score === least ? "worst" : ""));
}
