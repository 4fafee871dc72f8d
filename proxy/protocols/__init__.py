"""Wire protocols: request JSON to `TurnRequest`, answers to reply JSON or stream bytes.

One package per API: `chat` (OpenAI chat completions), `completions` (OpenAI completions), `responses` (OpenAI
responses), `messages` (Anthropic messages); and the module `generate` (token ids). They do not import each other; the
other modules hold shared code.
"""
