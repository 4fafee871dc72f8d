"""Images of conversations: their bytes, by digest. This package is independent of models."""
