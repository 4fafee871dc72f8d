"""OpenAI responses: `protocol` parses the request, `response_object` writes the whole reply, `stream` its events."""
