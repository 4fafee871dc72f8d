"""Images of conversations: their bytes, by digest. Nothing here knows a model."""
