"""How models write tool calls: one reader a notation, and the registry of formats by name."""
