"""Sampled token ids to an assistant message: text, reasoning and tool calls, streamed as deltas."""
