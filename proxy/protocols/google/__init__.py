"""Google's generateContent: `protocol` parses the request, `contents` its conversation, `reply` writes the reply."""
