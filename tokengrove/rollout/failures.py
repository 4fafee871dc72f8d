"""What went wrong with an agent that ran elsewhere.

Exceptions cross process pools as text: many of them cannot be unpickled, and one such breaks a whole pool.
"""

from __future__ import annotations


class AgentFailed(Exception):
    """An agent raised an exception in another process, or one that would have ended this process.

    `kind` is the name of its class, with its module unless it is a builtin; `message` its text; `traceback` the whole
    traceback as text, which Python also shows below that of this exception.
    """

    def __init__(self, kind: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind, self.message, self.traceback = kind, message, traceback
        if traceback:
            self.add_note(f"In the other process:\n{traceback}")


class WorkerDied(AgentFailed):
    """The process that ran an agent ended in the middle: killed, crashed, or left by `os._exit`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "")
        self.kind, self.message = type(self).__name__, message
