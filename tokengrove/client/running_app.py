"""ASGI applications that run in this process for clients, from the first client to the last.

An application runs on one event loop and answers every request there, whatever thread or loop the request comes from.
An application that runs already is neither started nor stopped.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import Context
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

from tokengrove.client.asgi import ASGIApp, Exchange, Headers, Message
from tokengrove.errors import ConfigurationError

T = TypeVar("T")

_GRACE_S = 5.0
"""Seconds for disconnected requests to end when the application stops; then they are cancelled."""

_LOOK_S = 1.0
"""Seconds between checks, during a wait, that the application's event loop is not closed."""

_STOPPED = "the application has stopped, with its last client or with its event loop"


class AppStopped(Exception):
    """The application no longer runs."""


class RunningApp:
    """An application, its event loop, and the number of clients that hold it.

    `started` and `ended` are done when its lifespan has started and ended; each raises the lifespan's errors.
    """

    def __init__(self, app: ASGIApp, loop: asyncio.AbstractEventLoop, *, owned: bool) -> None:
        """`owned`: whether it is started here, and therefore stopped here."""
        self.app, self.loop, self.owned = app, loop, owned
        self.holders = 0
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._state: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self._asked = False
        self._refusal: str | None = None
        self._stopping = asyncio.Event()
        self._open: dict[asyncio.Task[None], Exchange] = {}
        if not owned:
            self.started.set_result(None)

    def start_here(self) -> None:
        """Start the lifespan on the running event loop."""
        self._task = self.loop.create_task(self._live(), context=Context())

    def start_in_thread(self) -> None:
        """Start the event loop in a separate thread, and the lifespan on it. The thread ends with the lifespan."""
        # A daemon: otherwise, a client that is never closed would keep the process alive.
        self._thread = threading.Thread(target=self._run, name="tokengrove-app", daemon=True)
        self._thread.start()

    @property
    def in_thread(self) -> bool:
        """Whether its event loop runs in a separate thread."""
        return self._thread is not None

    async def ready(self) -> None:
        """Wait until it has started. Raises the lifespan's error, and AppStopped."""
        if not self.started.done():
            await asyncio.shield(asyncio.wrap_future(self.started))
        self._check()

    def wait_ready(self) -> None:
        """Block until it has started. Raises as `ready` does, and RuntimeError on its own event loop."""
        if not self.started.done():
            self._wait(self.started)
        self._check()

    async def answer(
        self, scope: Message, body: bytes, timeout_s: float | None, opened: set[Exchange]
    ) -> tuple[Exchange, int, Headers]:
        """Send a request and wait for the head of its answer. `opened` has the exchange until it is complete."""
        if self._stopping.is_set():
            raise AppStopped(_STOPPED)
        exchange = Exchange(self.app, {**scope, "state": self._state.copy()}, body)
        task = asyncio.create_task(exchange.run(), context=Context())
        self._open[task] = exchange
        opened.add(exchange)

        def over(task: asyncio.Task[None]) -> None:
            del self._open[task]
            opened.discard(exchange)

        task.add_done_callback(over)
        status, headers = await exchange.head(timeout_s)
        return exchange, status, headers

    async def run(self, steps: Coroutine[Any, Any, T]) -> T:
        """Await `steps` on the application's event loop. Raises AppStopped if the loop is closed."""
        if asyncio.get_running_loop() is self.loop:
            return await steps
        sent = asyncio.wrap_future(self._submit(steps))
        try:
            while not (await asyncio.wait([sent], timeout=_LOOK_S))[0]:
                if self.loop.is_closed():
                    raise AppStopped(_STOPPED)
            if sent.cancelled():
                raise AppStopped(_STOPPED)
            return sent.result()
        finally:
            sent.cancel()

    def wait(self, steps: Coroutine[Any, Any, T]) -> T:
        """Block until `steps` have run on the application's event loop.

        Raises AppStopped if the loop is closed, and RuntimeError if called on that loop, which would wait for ever.
        """
        try:
            self.refuse_own_loop()
        except RuntimeError:
            steps.close()
            raise
        sent = self._submit(steps)
        try:
            return self._wait(sent)
        except BaseException:
            sent.cancel()
            raise

    def leave(self) -> bool:
        """Release it. The last holder stops it. Returns True if the caller may wait until it has stopped."""
        with _lock:
            self.holders -= 1
            last = not self.holders
        if last:
            self.stop()
        return last and self.owned

    def stop(self) -> None:
        """Disconnect all readers, and stop an application that was started here. Any thread may call this."""
        with suppress(RuntimeError):  # the event loop is closed, and the application has stopped
            self.loop.call_soon_threadsafe(self._stop)

    async def stopped(self) -> None:
        """Wait until it has stopped. Raises the lifespan's error."""
        await asyncio.shield(asyncio.wrap_future(self.ended))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def wait_stopped(self) -> None:
        """Block until it has stopped. Raises as `stopped` does."""
        try:
            self._wait(self.ended)
        finally:
            if self._thread is not None:
                self._thread.join()

    def leave_soon(self) -> None:
        """Release it without waiting, safely in a finalizer, which can run anywhere, even while a lock is held."""
        with suppress(RuntimeError):  # as in `stop`
            self.loop.call_soon_threadsafe(self.leave)

    def _check(self) -> None:
        self.started.result()
        if self.ended.done() or (not self.owned and _own_loop(self.app) is not self.loop):
            raise AppStopped(_STOPPED)

    def _submit(self, steps: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(steps, self.loop)
        except RuntimeError:
            steps.close()
            raise AppStopped(_STOPPED) from None

    def _wait(self, future: Future[T]) -> T:
        """Block until `future` is done. Raises AppStopped if it can never be done."""
        self.refuse_own_loop()
        while not wait([future], _LOOK_S).done:
            if self.loop.is_closed():
                raise AppStopped(_STOPPED)
        if future.cancelled():
            raise AppStopped(_STOPPED)
        return future.result()

    def refuse_own_loop(self) -> None:
        """Raise RuntimeError on the application's own event loop, where blocking would be a deadlock."""
        if _current_loop() is self.loop:
            raise RuntimeError(
                "a blocking client was used on the event loop that runs its application, so it would wait for itself: "
                "use AsyncClient, or use the blocking client in a thread (asyncio.to_thread)"
            )

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        """Run the lifespan until `stop`."""
        failure: Exception | None = None
        try:
            await self._lifespan()
        except Exception as error:
            failure = error
        finally:
            with _lock:
                del _running[id(self.app)]
            if not self.started.done():
                self.started.set_exception(failure or AppStopped(_STOPPED))
                failure = None  # `started` raises it
            if failure is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(failure)

    async def _lifespan(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self._state}
        try:
            await self.app(scope, self._receive, self._send)
        except Exception:
            if self._refusal is not None or self.started.done():
                raise
        if self._refusal is not None:
            raise ConfigurationError(self._refusal)
        if not self.started.done():  # an application without a lifespan returns, or raises without any message
            self.started.set_result(None)
        await self._stopping.wait()
        await self._end_requests()

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "lifespan.startup"}
        await self._stopping.wait()
        await self._end_requests()
        return {"type": "lifespan.shutdown"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "lifespan.startup.complete":
            self.started.set_result(None)
        elif message["type"].endswith(".failed"):
            self._refusal = message.get("message") or f"the application has sent {message['type']}"

    def _stop(self) -> None:
        self._stopping.set()
        for exchange in self._open.values():
            exchange.leave()

    async def _end_requests(self) -> None:
        """Wait for disconnected requests, and cancel those that do not end in time."""
        if self._open:
            await asyncio.wait(self._open, timeout=_GRACE_S)
        for task in self._open:
            task.cancel()


_running: dict[int, RunningApp] = {}
"""The applications that clients have started, by the application's `id`."""
_lock = threading.Lock()


class AppHold:
    """A client's hold on an application, which runs from the first use until all holds are closed or collected."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._taken: list[RunningApp] = []
        self._closed = False
        self._let_go = weakref.finalize(self, _let_go, self._taken)
        self._let_go.atexit = False  # `_stop_all` does it earlier

    async def ready(self) -> RunningApp:
        """The running application, on the running event loop if no client has started it yet.

        Raises the error of the lifespan's start, and AppStopped.
        """
        running = self._take(asyncio.get_running_loop())
        await running.ready()
        return running

    def wait_ready(self) -> RunningApp:
        """The running application, in a separate thread if no client has started it yet. Raises as `ready` does."""
        running = self._take(None)
        running.wait_ready()
        return running

    async def aclose(self) -> None:
        """Release the application. The last holder waits until it has stopped. Raises the lifespan's error."""
        if (last := self._leave()) is not None:
            await last.stopped()

    def close(self) -> None:
        """Blocking `aclose`."""
        if (last := self._leave()) is not None:
            last.wait_stopped()

    def _take(self, loop: asyncio.AbstractEventLoop | None) -> RunningApp:
        if self._taken:
            return self._taken[0]
        with _lock:
            if self._closed:
                raise AppStopped("the client of this application is closed")
            if not self._taken:
                self._taken.append(_running_app(self.app, loop))
            return self._taken[0]

    def _leave(self) -> RunningApp | None:
        """Close the hold, and return the application if this was its last hold."""
        with _lock:
            self._closed = True
            running = self._taken.pop() if self._taken else None
        return running if running is not None and running.leave() else None


def _let_go(taken: list[RunningApp]) -> None:
    for running in taken:
        running.leave_soon()


def _running_app(app: ASGIApp, loop: asyncio.AbstractEventLoop | None) -> RunningApp:
    """The running application, with one more holder. If necessary, it is started on `loop`, or in a thread."""
    running = _running.get(id(app))
    if running is None:
        if (own := _own_loop(app)) is not None:
            running = RunningApp(app, own, owned=False)
        else:
            running = _running[id(app)] = RunningApp(app, loop or asyncio.new_event_loop(), owned=True)
            if loop is not None:
                running.start_here()
            else:
                _stop_at_exit()
                running.start_in_thread()
    if loop is None:
        running.refuse_own_loop()
    running.holders += 1
    return running


def _own_loop(app: ASGIApp) -> asyncio.AbstractEventLoop | None:
    """The event loop of an application of this project that runs already; None for any other application."""
    loop = getattr(app, "running_loop", None)
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


def _current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@cache
def _stop_at_exit() -> None:
    """Stop applications in threads when the process ends, before executors refuse work, which the stop needs.

    `atexit` handlers run after that; they are the fallback for interpreters without `_register_atexit`. The last
    registered handler is called first, so the executors' handler must be registered before.
    """
    import_module("concurrent.futures.thread")
    getattr(threading, "_register_atexit", atexit.register)(_stop_all)


def _stop_all() -> None:
    for running in list(_running.values()):
        if running.in_thread:
            running.stop()
            with suppress(Exception):  # no caller is left to handle it
                running.wait_stopped()
