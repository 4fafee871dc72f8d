"""Routes: the names that a request's `model` may have, and what serves each."""
