"""The other process: it calls one function after the other, each with environment variables of its own.

What leaves it is what the function returned, or text.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tokengrove.rollout.environment import variables_set
from tokengrove.rollout.script import Script, import_script


class Job(NamedTuple):
    """A function of a module, its arguments, and the variables that are set while it runs (None: absent)."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    variables: Mapping[str, str | None]


class Sent(NamedTuple):
    """A pickled `Job` or other value, and where the script of the program is that sends it."""

    job: bytes
    script: Script


class Returned(NamedTuple):
    """What the function returned."""

    value: Any


class Raised(NamedTuple):
    """What it raised: the name of the class, with its module unless it is a builtin, the message and the traceback."""

    kind: str
    message: str
    traceback: str


def main() -> None:
    """Say that the process has started, then answer jobs until the other side closes the connection."""
    connection: Connection[bytes, bytes] = Connection(int(sys.argv[1]))
    threading.Thread(target=die_with_the_other_side, args=[connection.fileno()], daemon=True).start()
    connection.send_bytes(b"started")
    while True:
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(payload))


def die_with_the_other_side(connection: int) -> None:
    """Kill this process and what it has started when the program that sends jobs is gone, in whatever way.

    A program that was killed could not do it, and an agent that hangs would not notice.
    """
    hung_up = select.poll()
    hung_up.register(connection, 0)  # that the other end is closed is told in any case
    hung_up.poll()
    os.killpg(0, signal.SIGKILL)


def _answer(payload: bytes) -> bytes:
    """Call a pickled `Job`; return a pickled `Returned` or `Raised`, whatever happens."""
    doing = "the other process cannot rebuild what it was sent: "
    try:
        job: Job = rebuilt(pickle.loads(payload))
        doing = ""
        with variables_set(job.variables):
            result = job.function(**job.arguments)
        doing = f"what it returned, of type {type(result).__name__}, cannot be pickled: "
        return pickle.dumps(Returned(result))
    except BaseException as error:
        return pickle.dumps(_as_text(error, doing))


def rebuilt(sent: Sent) -> Any:
    """What was pickled; the script of the program is imported if that needs what is defined in it."""
    try:
        return pickle.loads(sent.job)
    except AttributeError as error:
        if "__main__" not in str(error):
            raise
        if sent.script.module is None and sent.script.file is None:
            told = f"{error}; what is defined in a notebook or on stdin has to go into a module"
            raise AttributeError(told) from error
        import_script(sent.script)
        return pickle.loads(sent.job)


def _as_text(error: BaseException, before: str) -> Raised:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(error)
    except Exception as failure:
        message = f"its text cannot be made: {failure!r}"
    return Raised(name, before + message, "".join(traceback.format_exception(error)))
