"""The lifespan of an application of this process: who starts it, who stops it, and what each client is told."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import until
from tokengrove.client import AsyncClient, Client, ServerUnreachable
from tokengrove.client.asgi import Message
from tokengrove.client.http_clients import IN_PROCESS
from tokengrove.client.unreachable import NoAddress
from tokengrove.errors import ConfigurationError, InvalidRequest


class App:
    """An application that answers `{}`. `events`: what happened to its lifespan.

    `fails`: `start` or `stop`, where its lifespan raises; `refuses`: a reason that its start is refused with.
    """

    def __init__(self, fails: str = "", refuses: str = "", opens: asyncio.Event | None = None) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()
        self._fails, self._refuses, self._opens = fails, refuses, opens

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        self.threads.add(threading.get_ident())
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        content = str(scope["state"].get("key")).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"state": "%s"}' % content})

    async def _live(self, scope: Message, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "lifespan.startup"
        self.events.append("starts")
        scope["state"]["key"] = "of the lifespan"
        if self._opens is not None:
            await self._opens.wait()
        if self._refuses:
            await send({"type": "lifespan.startup.failed", "message": self._refuses})
            return
        if self._fails == "start":
            await send({"type": "lifespan.startup.failed", "message": "a traceback"})
            raise LookupError("no start")
        await send({"type": "lifespan.startup.complete"})
        try:
            assert (await receive())["type"] == "lifespan.shutdown"
        finally:
            self.events.append("stops")
        if self._fails == "stop":
            raise LookupError("no stop")
        await send({"type": "lifespan.shutdown.complete"})


async def test_the_block_starts_and_stops_the_application() -> None:
    app = App()
    async with AsyncClient(app=app) as client:
        assert app.events == ["starts"]
        assert await client.health() == {"state": "of the lifespan"}
    assert app.events == ["starts", "stops"]
    assert app.threads == {threading.get_ident()}


def test_the_block_of_a_blocking_client_runs_the_application_in_one_thread_that_ends() -> None:
    app, before = App(), threading.active_count()
    with Client(app=app) as client:
        assert app.events == ["starts"]
        assert client.health() == {"state": "of the lifespan"}
    assert app.events == ["starts", "stops"]
    assert len(app.threads) == 1
    assert app.threads != {threading.get_ident()}
    assert threading.active_count() == before


async def test_without_a_block_the_first_call_starts_and_aclose_stops() -> None:
    app = App()
    client = AsyncClient(app=app)
    assert app.events == []
    await asyncio.gather(client.health(), client.health())
    assert app.events == ["starts"]
    await client.aclose()
    assert app.events == ["starts", "stops"]
    await client.aclose()


def test_without_a_block_the_first_call_starts_and_close_stops() -> None:
    app = App()
    client = Client(app=app)
    client.health()
    client.close()
    assert app.events == ["starts", "stops"]
    client.close()


def test_a_blocking_client_that_nobody_closes_stops_the_application_when_it_is_collected() -> None:
    app, before = App(), set(threading.enumerate())
    Client(app=app).health()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert app.events == ["starts", "stops"]
    assert set(threading.enumerate()) <= before


async def test_an_asyncio_client_that_nobody_closes_stops_the_application_when_it_is_collected() -> None:
    app = App()
    await AsyncClient(app=app).health()
    gc.collect()
    await until(lambda: app.events == ["starts", "stops"])


def test_the_end_of_the_event_loop_stops_the_application() -> None:
    app = App()
    client = AsyncClient(app=app)
    asyncio.run(client.health())
    assert app.events == ["starts", "stops"]
    with pytest.raises(ServerUnreachable, match="has stopped"):
        asyncio.run(client.health())


def test_the_end_of_the_process_stops_an_application_that_runs_in_a_thread(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio\n"
        "from tokengrove.client import Client\n"
        "async def app(scope, receive, send):\n"
        "    if scope['type'] == 'lifespan':\n"
        "        await receive()\n"
        "        await send({'type': 'lifespan.startup.complete'})\n"
        "        await receive()\n"
        "        await asyncio.to_thread(print, 'stops')\n"
        "        await send({'type': 'lifespan.shutdown.complete'})\n"
        "    else:\n"
        "        await send({'type': 'http.response.start', 'status': 200})\n"
        "        await send({'type': 'http.response.body', 'body': b'{}'})\n"
        "client = Client(app=app)\n"
        "print(client.health())\n"
    )
    ended = subprocess.run([sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "{}\nstops\n", "")


async def test_clients_share_an_application_and_the_last_stops_it() -> None:
    app = App()
    async with AsyncClient(app=app) as first:
        second = AsyncClient(app=app)
        await second.health()
        await first.aclose()
        assert app.events == ["starts"]
        await second.health()
        with pytest.raises(RuntimeError, match="closed"):
            await first.health()
        await second.aclose()
    assert app.events == ["starts", "stops"]


async def test_a_blocking_client_in_a_thread_shares_the_event_loop_of_the_others() -> None:
    app = App()

    def agent() -> Any:
        with Client(app=app) as client, client.http_client() as http:
            return client.health(), http.get(IN_PROCESS).json()

    async with AsyncClient(app=app):
        assert await asyncio.to_thread(agent) == ({"state": "of the lifespan"},) * 2
    assert app.events == ["starts", "stops"]
    assert app.threads == {threading.get_ident()}


def test_asyncio_agents_on_another_event_loop_reach_the_application_of_a_blocking_client() -> None:
    app = App()

    async def agent() -> Any:
        async with AsyncClient(app=app) as client, client.http_client() as http:
            return await client.health(), (await http.get(IN_PROCESS)).json()

    with Client(app=app):
        assert asyncio.run(agent()) == ({"state": "of the lifespan"},) * 2
    assert app.events == ["starts", "stops"]
    assert len(app.threads) == 1


async def test_a_blocking_call_on_the_event_loop_of_the_application_is_refused() -> None:
    app = App()
    async with AsyncClient(app=app):
        with pytest.raises(RuntimeError, match="use AsyncClient"):
            Client(app=app).health()
        with Client(app=app).http_client() as http, pytest.raises(RuntimeError, match="to_thread"):
            http.get(IN_PROCESS)
    assert app.events == ["starts", "stops"]


async def test_an_application_that_says_that_it_runs_is_neither_started_nor_stopped() -> None:
    app: Any = App()
    app.running_loop = asyncio.get_running_loop()
    async with AsyncClient(app=app) as client:
        assert await client.health() == {"state": "None"}
        assert await asyncio.to_thread(lambda: Client(app=app).health()) == {"state": "None"}
        app.running_loop = None
        with pytest.raises(ServerUnreachable, match="has stopped"):
            await client.health()
    assert app.events == []


async def test_a_lifespan_that_fails_to_start_raises_its_reason_for_all_who_wait() -> None:
    opens = asyncio.Event()
    app = App(fails="start", opens=opens)
    clients = [AsyncClient(app=app) for _ in range(2)]
    starts = asyncio.gather(*(client.health() for client in clients), return_exceptions=True)
    await until(lambda: bool(app.events))
    opens.set()
    assert [repr(error) for error in await starts] == ["LookupError('no start')"] * 2
    for client in clients:
        await client.aclose()
    assert app.events == ["starts"]


def test_a_lifespan_that_fails_to_start_raises_its_reason_in_a_blocking_client() -> None:
    before = threading.active_count()
    client = Client(app=App(fails="start"))
    with pytest.raises(LookupError, match="no start"), client:
        raise AssertionError("the block was entered")
    client.close()
    assert threading.active_count() == before


async def test_a_start_that_is_refused_with_a_text_raises_the_text() -> None:
    with pytest.raises(ConfigurationError, match="the disk is full"):
        await AsyncClient(app=App(refuses="the disk is full")).health()


async def test_a_lifespan_that_fails_to_stop_raises_its_reason_at_the_end_of_the_block() -> None:
    with pytest.raises(LookupError, match="no stop"):
        async with AsyncClient(app=App(fails="stop")) as client:
            await client.health()


async def test_who_stops_waiting_for_the_start_leaves_the_application_to_the_others() -> None:
    opens = asyncio.Event()
    app = App(opens=opens)
    first, second = AsyncClient(app=app), AsyncClient(app=app)
    waiting = [asyncio.create_task(client.health()) for client in (first, second)]
    await until(lambda: bool(app.events))
    waiting[0].cancel()
    opens.set()
    assert await waiting[1] == {"state": "of the lifespan"}
    for client in (first, second):
        await client.aclose()
    assert app.events == ["starts", "stops"]


class Silent(App):
    """An application that never answers. `asked`: set by a request."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.asked.set()
            await asyncio.Event().wait()
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("blocking", [True, False])
def test_who_waits_for_an_answer_is_told_that_the_event_loop_of_the_application_has_ended(blocking: bool) -> None:
    app, failures = Silent(), list[BaseException]()

    def agent() -> None:
        try:
            Client(app=app).health() if blocking else asyncio.run(AsyncClient(app=app).health())
        except BaseException as error:
            failures.append(error)

    async def main() -> None:
        client = AsyncClient(app=app)
        await client.hold.ready()  # type: ignore[union-attr]
        waiting.start()
        await asyncio.to_thread(app.asked.wait)

    waiting = threading.Thread(target=agent)
    asyncio.run(main())
    waiting.join(60)
    assert [type(failure) for failure in failures] == [NoAddress]


async def test_agents_of_a_closed_client_are_told_so() -> None:
    async with AsyncClient(app=App()) as client:
        http = client.http_client()
    async with http:
        with pytest.raises(httpx.ConnectError, match="closed"):
            await http.get(IN_PROCESS)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_has_either_a_url_or_an_app(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="none of them"):
        kind()
    with pytest.raises(InvalidRequest, match="both of them"):
        kind("http://127.0.0.1:8080", app=App())
    with pytest.raises(InvalidRequest, match="httpx or httpx2, not 'requests'"):
        kind(app=App()).http_client("requests")


async def test_a_stop_cancels_the_requests_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokengrove.client.running_app._GRACE_S", 0.0)
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise ValueError("this application has no lifespan")
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    client = AsyncClient(app=app)
    asking = asyncio.create_task(client.health())
    await begun.wait()
    await client.aclose()
    with pytest.raises(ServerUnreachable):
        await asking
    await cancelled.wait()
