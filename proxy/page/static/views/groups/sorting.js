// Orders of a group's sessions. Pure: no DOM.

const ORDERS = {
  score: ({ summary: one }, { summary: other }) => (other.score ?? -Infinity) - (one.score ?? -Infinity) || 0,
  turns: ({ summary: one }, { summary: other }) => other.turns - one.turns,
};

/** Sessions by "score" (best first, those without one last) or "turns"; any other order is that of their start. Not in place. */
export function sorted(rows, order) {
  const compare = Object.hasOwn(ORDERS, order) ? ORDERS[order] : null;
  return compare ? [...rows].sort(compare) : rows;
}
