// Counts and versions in words. Pure: no DOM.

/** {"branched": 2, "rewritten": 0} as "2 branched". Names with an underscore are written as words. */
export function counted(counts) {
  return Object.entries(counts)
    .filter(([, count]) => count > 0)
    .sort(([, one], [, other]) => other - one)
    .map(([name, count]) => `${count} ${name.replaceAll("_", " ")}`)
    .join(", ");
}

/** A reward with as many decimals in each row, so that columns line up: 0.5 as "0.50". */
export const aligned = (value, decimals = 2) =>
  typeof value === "number" ? (Math.abs(value) < 1e9 ? value.toFixed(decimals) : value.toExponential(1)).replace(/^-/, "\u2212") : "–";

/** The weight versions of an entry: "3", "3–5"; before its first token that of its start. */
export function versionsText({ version, summary }) {
  const [low, high] = summary.versions ?? [version, version];
  if (low === null || low === undefined) return "–";
  return low === high ? String(low) : `${low}–${high}`;
}
