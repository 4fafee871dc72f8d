// What a row of the tree says in words: for those who see it, and for those who hear it. Pure.
import { inWords } from "../../../lib/words.js";

/** Whether a turn neither goes on nor begins a conversation of its own: what the API counts as `forks`. */
export const isFork = (node) => isCompared(node) && node.reason !== "new_root";

/** Whether the API may compare a turn with its nearest one: a fork, or a new root, which nearly was one. */
export const isCompared = (node) => node.status === "complete" && !["first", "continued"].includes(node.reason);

/** Whether a node ended otherwise than complete. */
export const isLost = (node) => ["failed", "aborted", "superseded", "begun"].includes(node.status);

/** The word that stands in a node's row: its reason if it is complete, else its status. */
export function wordOf(node) {
  if (node.status === "complete") return inWords(node.reason);
  return node.status === "begun" ? "cut off" : inWords(node.status);
}

/** What the word of a row means; "" until the meanings are read. `meanings`: of `useReasons`. */
export function meaningOf(node, meanings) {
  if (node.status === "running") return "the call has begun and not ended";
  return (node.status === "complete" ? meanings.reason?.[node.reason] : meanings.status?.[node.status]) ?? "";
}

/** What a row says of the answer: its first words, its calls, or why there is none. */
export function excerpt(node) {
  if (node.status === "running" && !node.here) return "on another worker or server, or cut off";
  if (node.status === "running") return `${node.output_tokens ?? 0} tokens so far`;
  if (isLost(node) && node.error) return node.error;
  const { text = "", calls = [] } = node.answer ?? {};
  return [text, ...calls.map((name) => `${name}()`)].filter(Boolean).join("  ");
}

/** A complete turn whose prompt does not begin with its parent's tokens. */
export const isUnaligned = (node) => node.status === "complete" && Boolean(node.parent_id) && !node.aligned;

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
