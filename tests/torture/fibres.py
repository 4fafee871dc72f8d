"""Threads as steps of the event loop: a fibre runs only while it holds the baton, so a seed decides who runs when.

A fibre is a real thread. It hands the baton back when it would block, and at lines that `seam` names. The classes here
stand for those of `threading` and `queue`; used on the event loop itself, they raise Stalled instead of blocking.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Collection
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from tests.torture.loop import SeededLoop

_T = TypeVar("_T")

_RealThread, _RealSemaphore = threading.Thread, threading.Semaphore
_BATON_S = 60.0
"""Seconds of real time after which a fibre that does not hand the baton back counts as blocked."""


class Stalled(AssertionError):
    """The event loop would have blocked."""


class _Here(threading.local):
    fibre: Fibre | None = None


_here = _Here()
_running: SeededLoop | None = None


def bind(loop: SeededLoop | None) -> None:
    """Let `loop` run the fibres from now on."""
    global _running
    _running = loop


def running_loop() -> SeededLoop:
    """The loop that runs the fibres."""
    assert _running is not None, "threads are stepped only while a scenario runs"
    return _running


class Fibre:
    """A thread that runs `work` in steps of `loop`. `preempted`: the functions that may be interrupted at each line."""

    def __init__(
        self, loop: SeededLoop, work: Callable[[], object], name: str, preempted: Collection[CodeType] = ()
    ) -> None:
        self._loop, self._work, self.name, self._preempted = loop, work, name, preempted
        self._go, self._back = _RealSemaphore(0), _RealSemaphore(0)
        self._condition: Callable[[], bool] | None = None
        self._late = False
        self.ended = False
        self._thread = _RealThread(target=self._run, name=name, daemon=True)
        self._thread.start()
        loop.fibres.append(self)
        loop.call_soon(self.step)

    @property
    def can_go_on(self) -> bool:
        """Whether what it waits for holds, or has not come in time."""
        return self._late or (self._condition is not None and self._condition())

    def step(self) -> None:
        """Run it until it hands the baton back. Call on the loop."""
        self._condition = None
        self._go.release()
        if not self._back.acquire(timeout=_BATON_S):
            raise Stalled(f"the thread {self.name} blocks on something that is not stepped")
        if self.ended:
            self._loop.fibres.remove(self)
            self._thread.join()
        elif self._condition is None:
            self._loop.call_soon(self.step)

    def resume(self) -> None:
        """Schedule the next step of a fibre that can go on."""
        self._condition, self._late = None, False
        self._loop.call_soon(self.step)

    def park(self, condition: Callable[[], bool] | None = None, timeout: float | None = None) -> bool:
        """Hand the baton back, until `condition` holds. Return False if it does not within `timeout` virtual seconds.

        Call in the fibre.
        """
        self._condition = condition
        timer = None
        if condition is not None and timeout is not None:
            timer = self._loop.call_later(max(timeout, 0.0), self._expire)
        self._back.release()
        self._go.acquire()
        if timer is not None:
            timer.cancel()
        return condition is None or condition()

    def stack(self) -> str:
        """Where it is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _expire(self) -> None:
        self._late = True

    def _run(self) -> None:
        self._go.acquire()
        _here.fibre = self
        if self._preempted:
            sys.settrace(self._trace)
        try:
            self._work()
        except BaseException as error:
            self._loop.failures.append(error)
        finally:
            sys.settrace(None)
            self.ended = True
            self._back.release()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._trace_line if frame.f_code in self._preempted else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and self._loop.chance(self._loop.preemption):
            self.park()
        return self._trace_line


def pause(condition: Callable[[], bool], timeout: float | None = None) -> bool:
    """Wait until `condition` holds; return whether it does. Raises Stalled if the event loop would have to wait."""
    if condition():
        return True
    if (fibre := _here.fibre) is not None:
        until = None if timeout is None else running_loop().time() + timeout
        while not fibre.park(condition, None if until is None else until - running_loop().time()):
            if until is not None and running_loop().time() >= until:
                return False
        return True  # else another thread was faster, as with a lock
    if timeout is not None and timeout <= 0:
        return False
    raise Stalled("the event loop would block here")


def give_way() -> None:
    """Let others run, in a fibre."""
    if _here.fibre is not None:
        _here.fibre.park()


def sleep(seconds: float) -> None:
    """As `time.sleep`, on the virtual clock."""
    if _here.fibre is None:
        raise Stalled(f"the event loop would sleep {seconds} s here")
    _here.fibre.park(lambda: False, seconds)


class Thread:
    """Stands for `threading.Thread`."""

    preempted: Collection[CodeType] = ()

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Collection[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._arguments, self._named = target, tuple(args), dict(kwargs or {})
        self.name, self.daemon = name or "thread", bool(daemon)
        self._fibre: Fibre | None = None

    def start(self) -> None:
        target = self._target
        assert target is not None
        work = lambda: target(*self._arguments, **self._named)  # noqa: E731
        self._fibre = Fibre(running_loop(), work, self.name, self.preempted)

    def join(self, timeout: float | None = None) -> None:
        pause(lambda: not self.is_alive(), timeout)

    def is_alive(self) -> bool:
        return self._fibre is not None and not self._fibre.ended


class Event:
    """Stands for `threading.Event`."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return pause(lambda: self._set, timeout)


class SimpleQueue(Generic[_T]):
    """Stands for `queue.SimpleQueue`."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __init__(self) -> None:
        self._items: deque[_T] = deque()

    def put(self, item: _T) -> None:
        self._items.append(item)

    def get(self) -> _T:
        pause(lambda: bool(self._items))
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class Lock:
    """Stands for `threading.Lock` and `threading.RLock`."""

    def __init__(self) -> None:
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = _here.fibre or running_loop()
        if self._owner is not me:
            limit_s = 0.0 if not blocking else None if timeout < 0 else timeout
            if not pause(lambda: self._owner is None, limit_s):
                return False
            self._owner = me
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Condition:
    """Stands for `threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or Lock()
        self._waiters: list[list[bool]] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        woken = [False]
        self._waiters.append(woken)
        self._lock.release()
        pause(lambda: woken[0], timeout)
        self._lock.acquire()
        if not woken[0]:
            self._waiters.remove(woken)
        return woken[0]

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else running_loop().time() + timeout
        while not predicate():
            left_s = None if until is None else until - running_loop().time()
            if left_s is not None and left_s <= 0:
                return False
            self.wait(left_s)
        return True

    def notify(self, n: int = 1) -> None:
        for woken in self._waiters[:n]:
            woken[0] = True
        del self._waiters[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))
