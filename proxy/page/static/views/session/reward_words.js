// What a person's reward is set on, and what it replaces. Pure: no DOM.

/**
 * The turn that a reward of the session belongs to, as `set_reward` chooses it: the last complete main turn, of a trained
 * route. Undefined if there is none.
 */
export const lastMain = (nodes) =>
  nodes.findLast((node) => node.status === "complete" && node.purpose === "main" && (node.route_kind ?? "policy") === "policy");

/** The reward of a turn that a new one replaces; null if it has none. `name`: of a named reward, "" for the main one. */
export const replaced = (node, name) => (name ? (Object.hasOwn(node.rewards ?? {}, name) ? node.rewards[name] : null) : node.reward ?? null);

/** The body of `set_reward`. */
export const rewardBody = (node, value, name) => ({ reward: value, interaction_id: node.interaction_id, ...(name ? { name } : {}) });
