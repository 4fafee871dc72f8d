// Which tools differ between two turns, each as text to compare. Pure: no DOM.

/** [{name, change, recorded, sent}] of the tools that only one side has or that differ; "" where a side has none. */
export function toolDifferences(recorded, sent) {
  const [old, now] = [byName(recorded), byName(sent)];
  const found = [];
  for (const name of new Set([...old.keys(), ...now.keys()])) {
    const [before, after] = [old.get(name) ?? "", now.get(name) ?? ""];
    if (before !== after) found.push({ name, change: before === "" ? "added" : after === "" ? "removed" : "changed", recorded: before, sent: after });
  }
  if (found.length === 0) found.push({ name: "(order)", change: "of the tools differs", recorded: [...old.keys()].join("\n"), sent: [...now.keys()].join("\n") });
  return found;
}

const byName = (tools) => new Map(tools.map((tool) => [tool.function.name, JSON.stringify(tool.function, null, 2)]));
