"""Waiting in the task of a request for the end of its turn, while its client may leave or the task be cancelled."""

import asyncio
from typing import Any

import pytest

from proxy.api.connections import connected_until


class Client:
    """`receive` of a client: it has sent its request and leaves when `leave` is called."""

    def __init__(self) -> None:
        self._left = asyncio.Event()
        self.listening = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def receive(self) -> dict[str, Any]:
        self.listening.set()
        await self._left.wait()
        return {"type": "http.disconnect"}


async def waiting(client: Client, end: asyncio.Future[None]) -> asyncio.Task[bool]:
    """Return a task that waits for either, once it does."""
    task = asyncio.create_task(connected_until(end, client.receive))
    await client.listening.wait()
    return task


def new_end() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


async def test_an_end_before_the_wait_needs_no_client() -> None:
    client, end = Client(), new_end()
    end.set_result(None)
    assert await connected_until(end, client.receive)
    assert not client.listening.is_set()


async def test_the_end_is_reported_and_leaves_no_cancellation_behind() -> None:
    client, end = Client(), new_end()

    async def wait_twice() -> tuple[bool, int]:
        ended = await connected_until(end, client.receive)
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
        ended = await connected_until(end, client.receive)
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
        await connected_until(end, client.receive)
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
