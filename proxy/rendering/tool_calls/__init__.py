"""Tool-call formats: one module per notation, and the registry of formats by name."""
