"""The command line. Thin: flags become `Settings`, and every foreseen failure is one line and a non-zero exit."""

from proxy.commands.application import app, main

__all__ = ["app", "main"]
