"""The page that people look at: static files, which read what the HTTP API gives and nothing else.

Nothing here imports a part of the server. The files in `static` are served as they are, without a build step.
"""
