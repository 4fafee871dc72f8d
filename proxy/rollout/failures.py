"""What went wrong with an agent that ran elsewhere.

Exceptions cross process pools as text: many of them cannot be unpickled, and one such breaks a whole pool.
"""

from __future__ import annotations


class AgentFailed(Exception):
    """An agent raised an exception in another process.

    `kind` is the name of its class, with its module unless it is a builtin; `message` its text; `traceback` the whole
    traceback as text.
    """

    def __init__(self, kind: str, message: str, traceback: str = "") -> None:
        super().__init__(kind, message, traceback)
        self.kind, self.message, self.traceback = kind, message, traceback

    def __str__(self) -> str:
        told = f"{self.kind}: {self.message}" if self.message else self.kind
        return f"{told}\n\nIn the other process:\n{self.traceback}" if self.traceback else told


class WorkerDied(AgentFailed):
    """The process that ran an agent ended in the middle: killed, crashed, or left by `os._exit`."""
