"""Conversations to token ids: by the folder's own chat template, or by a renderer of the `renderers` package."""
