"""Count the entries of Python functions in a process: every call and every resumption of a generator, in all threads.

`python -m tests.bench.counting FD MODULE [ARGUMENT ...]` runs a module as `python -m` does, and answers over the socket
`FD`: each byte received is a question, the answer a line of JSON that maps functions to their entries since the first
question. It comes when no thread has entered a function for a while, so work that follows a reply is part of the count.
C functions are not counted, and the garbage collector is off: what it runs would depend on when it runs."""

from __future__ import annotations

import gc
import runpy
import socket
import sys
import threading
import time
from collections import Counter
from types import CodeType, FrameType
from typing import Any

import orjson

QUIET_S = 0.002
QUIET_CHECKS = 3


class Counting:
    """The counts of one process, from when `on` is set.

    Each thread has counts of its own, so that none waits for another or loses one.
    """

    def __init__(self) -> None:
        self.on = False
        self._threads: list[dict[CodeType, int]] = []
        self._modules: dict[CodeType, str] = {}

    def start(self) -> None:
        """Count in this thread and in all that start from now on."""
        threading.setprofile(self._begin)
        sys.setprofile(self._counter())

    def entries(self) -> int:
        return sum(sum(counts.copy().values()) for counts in self._threads)

    def by_function(self) -> Counter[str]:
        """Return the entries by `module.qualified_name`."""
        total: Counter[str] = Counter()
        for counts in self._threads:
            for code, count in counts.copy().items():
                total[f"{self._modules[code]}.{code.co_qualname}"] += count
        return total

    def _begin(self, frame: FrameType, event: str, argument: Any) -> None:
        """The first event of a new thread."""
        count = self._counter()
        sys.setprofile(count)
        count(frame, event, argument)

    def _counter(self) -> Any:
        counts: dict[CodeType, int] = {}
        modules = self._modules
        self._threads.append(counts)

        def count(frame: FrameType, event: str, argument: Any) -> None:
            if self.on and event == "call":
                code = frame.f_code
                if code not in counts:
                    modules[code] = str(frame.f_globals.get("__name__"))
                    counts[code] = 0
                counts[code] += 1

        return count


def answer_questions(counting: Counting, questions: socket.socket) -> None:
    """Answer until the other side closes the connection."""
    with questions:
        while questions.recv(1):
            counting.on = True
            _wait_until_quiet(counting)
            questions.sendall(orjson.dumps(counting.by_function()) + b"\n")


def _wait_until_quiet(counting: Counting) -> None:
    before, quiet = counting.entries(), 0
    while quiet < QUIET_CHECKS:
        time.sleep(QUIET_S)
        now = counting.entries()
        before, quiet = now, quiet + 1 if now == before else 0


def main() -> None:
    descriptor, module = int(sys.argv[1]), sys.argv[2]
    counting = Counting()
    # Started before counting, so that this thread is not counted itself.
    threading.Thread(target=answer_questions, args=(counting, socket.socket(fileno=descriptor)), daemon=True).start()
    gc.disable()
    sys.argv = [module, *sys.argv[3:]]
    counting.start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
