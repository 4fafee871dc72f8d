"""Wire protocols: request JSON to `TurnRequest`, answers to reply JSON or stream bytes.

One package per API: `chat` (OpenAI chat completions), `responses` (OpenAI responses), `messages` (Anthropic messages);
and the module `generate` (token ids). None imports another; the modules beside them hold shared code.
"""
