"""The command line. Flags become `Settings`; every expected failure is one line on stderr and a non-zero exit code."""

from proxy.commands.application import app, main

__all__ = ["app", "main"]
