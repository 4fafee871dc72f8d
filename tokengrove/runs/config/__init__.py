"""The configuration file of a run: its own options, the server's settings, and the keys of ROLL's agentic pipelines."""

from tokengrove.runs.config.read import RunFile, read

__all__ = ["RunFile", "read"]
