"""Conversations to token ids: the folder's own chat template, or an equivalent of the `renderers` package."""
