// Why the returns of a session's turns differ from its score, in words. Pure: no DOM.
import { reward } from "./format.js";

/**
 * A sentence or two; null if no return differs. `score`: of the session, or null; `returns`: {first, min, max} of its complete
 * turns; `turns`: their number; `forks`: how many went back; `discount`, `credit`, `reward_scope`, `episode_score`: as the API
 * has them.
 */
export function whyReturnsDiffer({ score, returns, turns, forks, discount, credit, reward_scope: scope, episode_score: given }) {
  if (score === null || score === undefined || returns.first === null) return null;
  if (near(returns.min, score) && near(returns.max, score)) return null;
  return [ofScore(given, scope), ofReturns(discount, credit, forks), ofFirst(score, returns.first, turns, discount)].filter(Boolean).join(" ");
}

function ofScore(given, scope) {
  if (typeof given === "number") return `The score ${reward(given)} was set at the end of the session, whatever its turns are rewarded with.`;
  if (scope === "path") return "The score is the mean over the paths, each with the sum of its rewards.";
  return "The score is the sum of all rewards.";
}

function ofReturns(discount, credit, forks) {
  const later = credit === "linear" ? "what completed later" : "what follows it";
  const branches = forks > 0 && credit !== "linear" ? ", as the mean over branches" : "";
  const less = discount === 1 ? "" : `, times the discount ${reward(discount)} for each turn in between`;
  return `The return of a turn is its own reward and that of ${later}${branches}${less}.`;
}

/** The sum for a session with a single reward at its end. */
function ofFirst(score, first, turns, discount) {
  const power = turns - 1;
  if (discount === 1 || power < 1 || score === 0 || !near(discount ** power * score, first)) return "";
  return `First turn: ${reward(discount)} ** ${power} × ${reward(score)} = ${reward(first)}.`;
}

const near = (one, other) => Math.abs(one - other) <= 1e-9 * Math.max(1, Math.abs(one), Math.abs(other));
