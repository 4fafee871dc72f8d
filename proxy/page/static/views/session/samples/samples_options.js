// The options of an export that the page offers, in the address and as the body of a request. Pure.

/** Each option: its field in the address and in the API, a label, and its values, the default first. */
export const OPTIONS = [
  { name: "layout", label: "Layout", values: ["concat", "individual", "tree", "padded"] },
  { name: "drift", label: "Unaligned turns", values: ["fork", "mask"], words: { fork: "begin a sample", mask: "stay, masked" } },
  { name: "reward_scope", label: "Reward of", values: ["", "session", "path", "agent"], words: { "": "default" } },
  { name: "advantages", label: "Advantages", values: ["", "grpo", "leave_one_out"], words: { "": "none" } },
  { name: "step_advantages", label: "Of steps", values: ["", "grpo", "leave_one_out"], words: { "": "none" } },
  { name: "unrewarded", label: "Unrewarded", values: ["", "zero", "skip"], words: { "": "default" } },
  { name: "turns", label: "Train", values: ["all", "last"], words: { all: "all turns", last: "last turns" } },
  { name: "constrained", label: "Grammar", values: ["", "true"], words: { "": "not trained", true: "trained" } },
  { name: "logprobs", label: "Logprobs", values: ["any", "rule"], words: { any: "trained", rule: "by the rule" } },
];

/** Those of layout padded: numbers have their default, others their values. */
export const PADDED_OPTIONS = [
  { name: "prompt_length", label: "Prompt", number: 1024 },
  { name: "response_length", label: "Response", number: 4096 },
  { name: "on_too_long", label: "Too long", values: ["drop", "truncate", "refuse"] },
  { name: "keep", label: "Keep", values: ["head", "tail", "middle"] },
];

/** The option `route` for the routes of a session ({name: {kind}}); null if it has none to choose from. */
export function routeOption(routes) {
  const names = Object.entries(routes ?? {}).filter(([, { kind }]) => kind !== "external").map(([name]) => name);
  return names.length ? { name: "route", label: "Route", values: ["", ...names], words: { "": "trained ones" } } : null;
}

const MOST_TOKENS = 1 << 20;

/** The value of an option in an address; its default for one that is missing or that nobody offers. */
export function valueOf(option, query) {
  const given = query[option.name];
  if (option.values) return option.values.includes(given) ? given : option.values[0];
  const number = Number(given);
  return Number.isInteger(number) && number >= 1 && number <= MOST_TOKENS ? number : option.number;
}

/** The query with one option set; defaults are left out of an address, and so is the sample, which may be another then. */
export function withOption(option, query, value) {
  const plain = String(value) === String(option.values ? option.values[0] : option.number);
  return { ...query, [option.name]: plain ? undefined : String(value), sample: undefined };
}

/**
 * The body of `POST /trajectories/export` for a query. With advantages all sessions of the group are asked for: a session
 * alone is compared with nothing.
 */
export function bodyOf(sessionId, groupId, query) {
  const chosen = Object.fromEntries(OPTIONS.map((option) => [option.name, valueOf(option, query)]));
  const { layout, drift, reward_scope, advantages, step_advantages, unrewarded, turns, constrained, logprobs } = chosen;
  const compares = Boolean(advantages || step_advantages);
  const which = compares && groupId ? { filter: { group_id: groupId, validation: "include" } } : { session_id: sessionId };
  const body = { ...which, layout, outline: true };
  if (query.route) body.route = [query.route];
  if (reward_scope) body.reward_scope = reward_scope;
  if (layout !== "tree") body.drift = drift;
  if (advantages) body.advantages = advantages;
  if (step_advantages) body.step_advantages = step_advantages;
  if (unrewarded) body.unrewarded = unrewarded;
  const train = { ...(turns === "all" ? {} : { turns }), ...(constrained ? { constrained: true } : {}) };
  if (logprobs !== "any") train.logprobs = logprobs;
  if (Object.keys(train).length) body.train = train;
  for (const option of shownOptions(query)) if (PADDED_OPTIONS.includes(option)) body[option.name] = valueOf(option, query);
  return body;
}

/** The options that have an effect together with those that are chosen. */
export function shownOptions(query) {
  const [layout] = OPTIONS, [, , tooLong] = PADDED_OPTIONS;
  const chosen = valueOf(layout, query), cuts = valueOf(tooLong, query) === "truncate";
  const plain = OPTIONS.filter(({ name }) => name !== "drift" || chosen !== "tree");
  const padded = chosen === "padded" ? PADDED_OPTIONS.filter(({ name }) => name !== "keep" || cuts) : [];
  return [...plain, ...padded];
}
