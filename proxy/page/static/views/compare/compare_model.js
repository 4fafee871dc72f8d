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
    ["longest context", facts.longest], ["seconds", tree.ended_at === null ? null : tree.ended_at - tree.created_at],
    ["weight versions", facts.versions === null ? null : [...new Set(facts.versions)].join("–")],
    ["task", tree.task_id], ["group", tree.group_id], ["discount", tree.discount],
    ...named("metric", tree.metrics), ...named("metadata", tree.metadata),
  ]);
}

/**
 * Both conversations from where they part: {same, rows}. `same`: how many messages are equal at the beginning. Rows:
 * {one, other, equal}: entries of `one` and `other` at the same place after it, undefined after the end of a side.
 * @param {{message: object, turn: string}[]} one
 * @param {{message: object, turn: string}[]} other
 */
export function parted(one, other) {
  const same = sameBeginning(one.map(({ message }) => message), other.map(({ message }) => message));
  const length = Math.max(one.length, other.length) - same;
  const rows = Array.from({ length }, (_, at) => {
    const [left, right] = [one[same + at], other[same + at]];
    return { one: left, other: right, equal: Boolean(left && right && sameMessage(left.message, right.message)) };
  });
  return { same, rows };
}

/** The messages of turns (of `turnsOf`) in order: {message, turn: the id of the turn that brought it, place}. */
export const messagesOf = (turns) =>
  turns.flatMap(({ node, places, answer }) => [...places, ...(answer ? [answer] : [])].map((place) => ({ message: place.message, turn: node.interaction_id, place })));
