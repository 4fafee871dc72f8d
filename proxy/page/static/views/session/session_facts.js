// What a session's header says, from its tree: counts, tokens, weight versions. Pure.
import { isFork, isLost } from "./tree/tree_words.js";

/**
 * Counts over the nodes of `nodesOf`: {turns, running, lost: {failed: 1}, forks, unaligned, sampled, longest, versions,
 * models}. `sampled`: output tokens of complete turns; `longest`: the most tokens of a prompt and its output;
 * `versions`: [least, most] of sampled tokens, null without any. `returns`: {first, min, max} of complete turns, null without.
 */
export function factsOf(nodes) {
  const complete = nodes.filter((node) => node.status === "complete");
  const versions = complete.flatMap((node) => (node.versions ?? []).map(([, version]) => version));
  return {
    turns: complete.length,
    running: nodes.filter((node) => node.status === "running").length,
    lost: counted(nodes.filter(isLost).map((node) => node.status)),
    forks: nodes.filter(isFork).length,
    sampled: complete.reduce((sum, node) => sum + node.output_tokens, 0),
    longest: complete.reduce((most, node) => Math.max(most, node.prompt_tokens + node.output_tokens), 0),
    versions: versions.length ? [least(versions), most(versions)] : null,
    returns: returnsOf(complete),
    models: [...new Set(complete.map((node) => node.model))],
  };
}

/** The node that an address names: by its id, or by the number of a complete turn. Undefined if there is none. */
export function nodeNamed(nodes, name) {
  if (!name) return undefined;
  return nodes.find((node) => node.interaction_id === name) ?? nodes.find((node) => String(node.turn) === name && node.turn !== null);
}

function returnsOf(complete) {
  const values = complete.map((node) => node.return).filter((value) => typeof value === "number");
  return values.length ? { first: values[0], min: least(values), max: most(values) } : { first: null, min: null, max: null };
}

function counted(words) {
  const counts = {};
  for (const word of words) counts[word] = (counts[word] ?? 0) + 1;
  return counts;
}

// Without spreading: a session may have more tokens' runs than a call may have arguments.
const least = (values) => values.reduce((found, value) => Math.min(found, value));
const most = (values) => values.reduce((found, value) => Math.max(found, value));
