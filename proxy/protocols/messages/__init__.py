"""Anthropic messages: `protocol` parses the request, `blocks` its content, `reply` writes the reply and its stream."""
