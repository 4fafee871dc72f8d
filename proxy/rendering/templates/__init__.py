"""Conversations to token ids: by the folder's own chat template, or by an equivalent from the `renderers` package."""
