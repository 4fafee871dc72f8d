"""The code of a process that calls functions for another one, one at a time, each with its own environment variables.

It sends back only the results of the functions, and text.
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
    """A function of a module, its arguments, and environment variables that are set during the call (None: unset)."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    variables: Mapping[str, str | None]


class Sent(NamedTuple):
    """A pickled `Job` or other value, and the location of the sender's script."""

    job: bytes
    script: Script


class Returned(NamedTuple):
    """The result of a function."""

    value: Any


class Raised(NamedTuple):
    """The exception of a function. `kind`: the name of its class, with the module unless it is a builtin."""

    kind: str
    message: str
    traceback: str


def main() -> None:
    """Report that the process has started, then run jobs until the other side closes the connection."""
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
    """Kill this process and its children when the program that sends jobs is gone, for any reason.

    A program that is killed cannot kill them, and an agent that hangs would not notice its end.
    """
    hung_up = select.poll()
    hung_up.register(connection, 0)  # a closed other end is always reported
    hung_up.poll()
    os.killpg(0, signal.SIGKILL)


def _answer(payload: bytes) -> bytes:
    """Run a pickled `Job`; return a pickled `Returned` or `Raised`. Never raises."""
    doing = "the other process cannot unpickle the call: "
    try:
        job: Job = rebuilt(pickle.loads(payload))
        doing = ""
        with variables_set(job.variables):
            result = job.function(**job.arguments)
        doing = f"the result, of type {type(result).__name__}, cannot be pickled: "
        return pickle.dumps(Returned(result))
    except BaseException as error:
        return pickle.dumps(_as_text(error, doing))


def rebuilt(sent: Sent) -> Any:
    """Unpickle a value. If it needs definitions of the program's script, the script is imported."""
    try:
        return pickle.loads(sent.job)
    except AttributeError as error:
        if "__main__" not in str(error):
            raise
        if sent.script.module is None and sent.script.file is None:
            told = f"{error}; definitions of a notebook or of stdin must be in a module"
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
