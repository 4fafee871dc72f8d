"""Waiting in the task of a request for the end of its turn, while its client may leave or the task be cancelled.

Each test runs twice: with a client that only ASGI knows, and with one that has a `ClientLine`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from proxy.api.connections import ClientLine, connected_until


class Watchers(list[Callable[[], None]]):
    """Watchers of a line. `listening`: there has been one."""

    def __init__(self, listening: asyncio.Event) -> None:
        super().__init__()
        self.listening = listening

    def append(self, watcher: Callable[[], None]) -> None:
        super().append(watcher)
        self.listening.set()


class Client:
    """`receive` and line of a client: it has sent its request and leaves when `leave` is called."""

    has_line = False

    def __init__(self) -> None:
        self._left = asyncio.Event()
        self.listening = asyncio.Event()
        self.line = ClientLine(cast("Any", None), cast("Any", None))
        self.line.watchers = Watchers(self.listening)

    def leave(self) -> None:
        self._left.set()
        self.line.leave()

    async def connected_until(self, end: asyncio.Future[None]) -> bool:
        ended = await (self.line.connected_until(end) if self.has_line else connected_until(end, self.receive))
        assert self.line.watchers == []
        return ended

    async def receive(self) -> dict[str, Any]:
        self.listening.set()
        await self._left.wait()
        return {"type": "http.disconnect"}


@pytest.fixture(autouse=True, params=[False, True], ids=["receive", "line"])
def _has_line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "has_line", request.param)


async def waiting(client: Client, end: asyncio.Future[None]) -> asyncio.Task[bool]:
    """Return a task that waits for either, once it does."""
    task = asyncio.create_task(client.connected_until(end))
    await client.listening.wait()
    return task


def new_end() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_an_end_before_the_wait_needs_no_client() -> None:
    client, end = Client(), new_end()
    end.set_result(None)
    assert await client.connected_until(end)
    assert not client.listening.is_set()


async def test_the_end_is_reported_and_leaves_no_cancellation_behind() -> None:
    client, end = Client(), new_end()

    async def wait_twice() -> tuple[bool, int]:
        ended = await client.connected_until(end)
        await asyncio.sleep(0)  # a cancellation that was left behind is raised here
        task = asyncio.current_task()
        assert task is not None
        return ended, task.cancelling()

    task = asyncio.create_task(wait_twice())
    await client.listening.wait()
    end.set_result(None)
    assert await task == (True, 0)


async def test_a_client_that_leaves_first_is_reported() -> None:
    client, end = Client(), new_end()
    task = await waiting(client, end)
    client.leave()
    assert await task is False


async def test_an_end_right_after_the_client_left_cancels_nothing() -> None:
    client, end = Client(), new_end()

    async def wait_and_go_on() -> bool:
        ended = await client.connected_until(end)
        end.set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return ended

    task = asyncio.create_task(wait_and_go_on())
    await client.listening.wait()
    client.leave()
    assert await task is False


@pytest.mark.parametrize("order", ["leave first", "end first"])
async def test_an_end_and_a_departure_at_one_moment_leave_no_cancellation_behind(order: str) -> None:
    client, end = Client(), new_end()

    async def wait_and_go_on() -> None:
        await client.connected_until(end)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    task = asyncio.create_task(wait_and_go_on())
    await client.listening.wait()
    steps = [client.leave, lambda: end.set_result(None)]
    for step in steps if order == "leave first" else reversed(steps):
        step()
    await task
    assert not task.cancelling()


@pytest.mark.parametrize("order", ["cancel first", "end first", "cancel alone", "cancel between"])
async def test_a_cancellation_by_others_is_never_taken_for_the_end(order: str) -> None:
    client, end = Client(), new_end()
    task = await waiting(client, end)
    if order == "cancel first":
        task.cancel()
        end.set_result(None)
    elif order == "end first":
        end.set_result(None)
        task.cancel()
    elif order == "cancel between":
        end.add_done_callback(lambda _: task.cancel())
        end.set_result(None)
    else:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_a_failed_turn_is_an_end_too() -> None:
    client, end = Client(), new_end()
    task = await waiting(client, end)
    end.set_exception(ValueError("the turn failed"))
    assert await task
    assert isinstance(end.exception(), ValueError)
