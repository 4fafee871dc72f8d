"""Watch the garbage collector, the sweeps and the sessions in the memory of a server.

`python -m tests.bench.watching FD MODULE [ARGUMENT ...]` runs a module as `python -m` does, and answers over the socket
`FD`. Each byte received is a question, the answer a line of JSON: `p` for the number of sessions, and the pauses and
sweeps since the last such question; `h` for what the sessions in memory hold. The product has no such hooks; they are
set here, from outside."""

from __future__ import annotations

import functools
import gc
import runpy
import socket
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import orjson

from proxy.sessions.idle_sweep import IdleSweep
from proxy.sessions.live_session import LiveSession
from proxy.sessions.registry import Registry
from proxy.sessions.session_memory import SessionMemory

SAMPLED = 200
"""Sessions that are measured: going through ten thousand takes minutes."""

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
_BLOCK = 16  # bytes that an allocation is rounded to


class Watch:
    """What was seen since the last question. Pauses: generation; sweeps: name; both with ns of CPU of their thread."""

    def __init__(self) -> None:
        self.registry: Registry | None = None
        self.pauses: list[tuple[int, int]] = []
        self.sweeps: list[tuple[str, int]] = []
        self._begun_ns = 0

    def start(self) -> None:
        """Set the hooks."""
        gc.callbacks.append(self._collected)
        self._remember_registry()
        self._time(SessionMemory, "sweep")
        self._time(IdleSweep, "expire_idle")

    def take(self) -> dict[str, Any]:
        """Return what was seen, and forget it."""
        pauses, sweeps = self.pauses, self.sweeps
        self.pauses, self.sweeps = [], []
        count = 0 if self.registry is None else len(self.registry.sessions())
        return {"pauses": pauses, "sweeps": sweeps, "sessions": count}

    def held(self) -> dict[str, Any]:
        """Return what a session holds alone: bytes and objects by type, means of some sessions."""
        assert self.registry is not None
        sessions = self.registry.sessions()
        chosen = sessions[:: max(len(sessions) // SAMPLED, 1)]
        return {"sessions": len(sessions), "measured": len(chosen), "types": held_by(chosen)}

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun_ns = time.thread_time_ns()
        else:
            self.pauses.append((info["generation"], time.thread_time_ns() - self._begun_ns))

    def _remember_registry(self) -> None:
        made, watch = Registry.__init__, self

        @functools.wraps(made)
        def remembered(registry: Registry, *args: Any, **named: Any) -> None:
            made(registry, *args, **named)
            watch.registry = registry

        Registry.__init__ = remembered  # type: ignore[method-assign]

    def _time(self, owner: type, name: str) -> None:
        work = getattr(owner, name)

        @functools.wraps(work)
        async def timed(*args: Any, **named: Any) -> Any:
            begun_ns = time.thread_time_ns()
            try:
                return await work(*args, **named)
            finally:
                self.sweeps.append((name, time.thread_time_ns() - begun_ns))

        setattr(owner, name, timed)


def held_by(sessions: Iterable[LiveSession]) -> dict[str, tuple[float, float]]:
    """Return objects and bytes by type that one session alone reaches, as means. Objects of several do not count."""
    owners: dict[int, int] = {}
    reached = [_reached(session) for session in sessions]
    for found in reached:
        for known in found:
            owners[known] = owners.get(known, 0) + 1
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for found in reached:
        for known, value in found.items():
            if owners[known] == 1:
                name = type(value).__qualname__
                count[name] += 1
                size[name] += _size(value)
    return {name: (count[name] / len(reached), size[name] / len(reached)) for name in count}


def _reached(root: Any) -> dict[int, Any]:
    found: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) not in found and not isinstance(value, _CODE):
            found[id(value)] = value
            waiting += gc.get_referents(value)
    return found


def _size(value: Any) -> int:
    size = sys.getsizeof(value)  # with the header of the collector
    if isinstance(value, array):
        return -(-size // _BLOCK) * _BLOCK + _BLOCK
    return -(-size // _BLOCK) * _BLOCK


def answer_questions(watch: Watch, questions: socket.socket) -> None:
    """Answer until the other side closes the connection."""
    with questions:
        while question := questions.recv(1):
            questions.sendall(orjson.dumps(watch.take() if question == b"p" else watch.held()) + b"\n")


def main() -> None:
    descriptor, module = int(sys.argv[1]), sys.argv[2]
    watch = Watch()
    watch.start()
    threading.Thread(target=answer_questions, args=(watch, socket.socket(fileno=descriptor)), daemon=True).start()
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
