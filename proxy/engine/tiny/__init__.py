"""The built-in model: a tiny random-weight Qwen3 folder with a tokenizer and a chat template."""
