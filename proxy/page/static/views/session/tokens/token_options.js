// Which export the states of tokens are of: its options out of the address, as `include=tokens` takes them. Pure: no DOM.
import { PADDED_OPTIONS, shownOptions, valueOf } from "../samples/samples_options.js";

const NAMES = ["layout", "train", "filter", "unrewarded", "reward_name", "reward_granularity", "reward_scope", "mask_unfinished", "stale"];

/**
 * {name: text} for the query of a request. The samples beside it share the address: what they leave out there is their
 * default, and what a layout refuses may still stand in it. `train=last` is short for its JSON.
 */
export function tokenOptions(query) {
  const options = Object.fromEntries(NAMES.filter((name) => query[name]).map((name) => [name, query[name]]));
  if (query.route) options.route = JSON.stringify([query.route]);
  if (query.drift && query.layout !== "tree") options.drift = query.drift;
  for (const option of shownOptions(query)) if (PADDED_OPTIONS.includes(option)) options[option.name] = String(valueOf(option, query));
  if (options.train === "last") options.train = '{"turns":"last"}';
  return options;
}
