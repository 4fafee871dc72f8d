"""OpenAI chat completions: `protocol` parses the request, `reply` writes the reply, whole or streamed."""
