"""Failures of agents that ran in another process.

Exceptions cross process pools as text: many exceptions cannot be unpickled, and a single one breaks the whole pool.
"""

from __future__ import annotations


class AgentFailed(Exception):
    """An agent raised an exception in another process, or an exception that would have ended this process.

    `kind`: the name of its class, with its module unless it is a builtin. `message`: its text. `traceback`: the whole
    traceback as text, which Python also shows below the traceback of this exception.
    """

    def __init__(self, kind: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind, self.message, self.traceback = kind, message, traceback
        if traceback:
            self.add_note(f"In the other process:\n{traceback}")


class WorkerDied(AgentFailed):
    """The process of an agent ended during the run: it was killed, crashed, or called `os._exit`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "")
        self.kind, self.message = type(self).__name__, message
