"""While no engine server is alive agents wait as in a pause; what was sampled goes on when one returns."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.contract import CollectedReply
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Fault, Reply, Script
from proxy.engine.servers import connection
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.settings import Settings
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import LiveWire, SglangWire
from tests.support import Server, default_url, tiny_renderer, until, user

LONG, SHORT = 80, 6
FIRST = 20
"""The tokens of a long reply before it stalls."""

KINDS = [(api, stream) for api in ("chat/completions", "responses", "messages") for stream in (False, True)]


@pytest.fixture
async def wires(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[LiveWire]]:
    """Two simulated SGLang servers whose long replies stall, until they are killed and started again."""
    async with stalling(2, monkeypatch) as live:
        yield live


@contextlib.asynccontextmanager
async def stalling(count: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[LiveWire]]:
    monkeypatch.setattr(connection, "_PROBE_S", 0.2)
    live = [LiveWire() for _ in range(count)]
    for wire in live:
        await wire.start()
        wire.wire.engine.script = stalls(wire.wire.engine.script)
    yield live
    for wire in live:
        await wire.kill()


def stalls(script: Script) -> Script:
    def stalling(request: GenerateRequest) -> Reply:
        most = request.sampling.max_tokens or 0
        fault = Fault.HANG if most > FIRST else None
        return replace(script(request), fault=fault, fault_after=FIRST)

    return stalling


@contextlib.asynccontextmanager
async def serving_on(folder: Path, wires: list[LiveWire], **settings: Any) -> AsyncIterator[Server]:
    """An app on a pool of the servers, which looks at them every 20 ms."""
    opener = connect(VOCABULARY, None)
    pool = Pool([wire.url for wire in wires], opener, start_timeout_s=5.0, check_s=0.02)
    configured = Settings(**{"database_url": default_url(folder), "migrate": True, **settings})
    app = build_app(configured, engine=pool, renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://t", timeout=60) as http,
    ):
        yield Server(app, http, cast("ScriptedEngine", pool))


def ask(server: Server, session: str, api: str = "chat/completions", *, most: int = LONG, **more: Any) -> Any:
    """Start a turn."""
    text = f"I am {session}."
    body = {"model": "m", "ignore_eos": True, "max_tokens": most, "messages": [user(text)], **more}
    if api == "responses":
        body = {"model": "m", "ignore_eos": True, "max_output_tokens": most, "input": text, **more}
    return asyncio.create_task(server.post(f"/{session}/v1/{api}", body))


def running(wires: list[LiveWire]) -> int:
    return sum(len(wire.wire.engine.running) for wire in wires)


async def shown(server: Server, name: str = "waiting") -> Any:
    return (await server.http.get("/engine")).json()[name]


async def waits(server: Server, count: int) -> None:
    """Wait until `count` requests wait."""
    await until(lambda: bool(server.app.state.turns.routes.main.gate.waiting == count))
    assert await shown(server) == count


async def test_engine_servers_hold_a_session_until_it_ends_and_siblings_prefer_the_same_one(
    tmp_path: Path, wires: list[LiveWire]
) -> None:
    async with serving_on(tmp_path, wires) as server:
        for name in ("a", "b"):
            await server.ok("/rl/start_session", {"session_id": name, "group_id": "g"})
            assert (await ask(server, name, most=SHORT)).status_code == 200
        counts = [shown["session_count"] for shown in (await server.http.get("/engine/servers")).json()["servers"]]
        assert sorted(counts) == [0, 2]
        await server.ok("/a/rl/end_session", {})
        counts = [shown["session_count"] for shown in (await server.http.get("/engine/servers")).json()["servers"]]
        assert sorted(counts) == [0, 1]
        metrics = (await server.http.get("/metrics")).text
        cached = [
            line for line in metrics.splitlines() if line.startswith("tokengrove_engine_server_cached_tokens_total")
        ]
        assert sorted(line.split()[-1] for line in cached) == ["0.0", "6.0"]  # each reply says that 3 were cached


async def die(wires: list[LiveWire], *, hung: bool = False) -> None:
    for wire in wires:
        wire.hung = hung
    if not hung:
        await asyncio.gather(*(wire.kill() for wire in wires))


async def check_exact(server: Server, session: str, tokens: int, count: int = 1) -> list[Any]:
    """Check the tokens of a session against the script; return its samples."""
    samples = await server.export(session, layout="individual")
    assert len(samples) == count
    for sample in samples:
        (start, end), ids = sample["turns"][0]["span"], sample["input_ids"]
        assert end - start == tokens and ids[start:end] == following(ids[:start], tokens)
        assert sample["logprobs"][start:end] == pytest.approx([math.log(0.5)] * tokens)
    return samples


def streamed_ids(text: str) -> list[int]:
    """The token ids of a stream of chat completions, in order."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice.get("token_ids") or ()]


@pytest.mark.parametrize("hung", [False, True], ids=["killed", "silent"])
async def test_requests_of_every_api_wait_and_go_on_with_what_they_have(
    tmp_path: Path, wires: list[LiveWire], hung: bool
) -> None:
    async with serving_on(tmp_path, wires) as server:
        begun = [ask(server, f"a{n}", api, stream=stream) for n, (api, stream) in enumerate(KINDS)]
        told = ask(server, "told", stream=True, return_token_ids=True)
        await until(lambda: running(wires) == len(KINDS) + 1)
        await die(wires, hung=hung)
        await waits(server, len(KINDS) + 1)
        late = [ask(server, f"b{n}", api, stream=stream) for n, (api, stream) in enumerate(KINDS)]
        await waits(server, 2 * len(KINDS) + 1)
        await server.ok("/c/v1/messages/count_tokens", {"model": "m", "messages": [user("hi")]})
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        metrics = (await server.http.get("/metrics")).text
        assert "tokengrove_waiting 13.0" in metrics and (await shown(server, "paused")) is None
        assert not any(task.done() for task in (*begun, *late, told))
        if hung:
            await die(wires)
        await wires[0].start()
        for answer, (_, stream) in zip(await asyncio.gather(*begun, *late), [*KINDS, *KINDS], strict=True):
            assert answer.status_code == 200
            if stream:
                assert "event: error" not in answer.text and '"error":{' not in answer.text
        for name in [f"{kind}{n}" for kind in "ab" for n in range(len(KINDS))]:
            await check_exact(server, name, LONG)
        [sample] = await check_exact(server, "told", LONG)
        start, end = sample["turns"][0]["span"]
        assert streamed_ids((await told).text) == sample["input_ids"][start:end]
        assert (await server.http.get("/ready")).status_code == 200 and await shown(server) == 0


async def test_the_choices_of_a_request_and_requests_outside_of_sessions_wait_too(
    tmp_path: Path, wires: list[LiveWire]
) -> None:
    async with serving_on(tmp_path, wires) as server:
        sampling = {"max_new_tokens": LONG, "ignore_eos": True}
        calls = [("/v1/generate", {"input_ids": [7, 8, 9], "sampling_params": sampling}), ("/s/v1/generate", {
            "input_ids": [7, 8, 9], "sampling_params": sampling})]  # fmt: skip
        begun = [ask(server, "n", n=3), *(asyncio.create_task(server.post(*call)) for call in calls)]
        await until(lambda: running(wires) == 5)
        await die(wires)
        await waits(server, 5)
        late = [asyncio.create_task(server.post(*call)) for call in calls]
        await waits(server, 7)
        await wires[1].start()
        several, *generated = await asyncio.gather(*begun, *late)
        assert [choice["index"] for choice in several.json()["choices"]] == [0, 1, 2]
        await check_exact(server, "n", LONG, count=3)
        for answer in generated:
            assert answer.json()["output_ids"] == following([7, 8, 9], LONG)


async def test_who_waits_too_long_is_told_what_to_check(tmp_path: Path, wires: list[LiveWire]) -> None:
    async with serving_on(tmp_path, wires, pause_timeout_s=0.3) as server:
        unary, stream = ask(server, "unary"), ask(server, "stream", stream=True)
        await until(lambda: running(wires) == 2)
        await die(wires)
        late = ask(server, "late")
        named = ("no engine server has been alive", "--pause-timeout-s", "/engine/servers")
        for refused in (await unary, await late):
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
            error = refused.json()["error"]
            assert error["code"] == "engine_unavailable" and all(name in error["message"] for name in named)
            assert "127.0.0.1" not in error["message"]
        told = (await stream).text
        assert named[0] in told and '"error"' in told and "[DONE]" not in told
        assert await shown(server) == 0
        assert {turn["status"] for name in ("unary", "stream") for turn in await server.tree(name)} == {"failed"}


async def test_clients_that_leave_are_noticed_while_they_wait(
    tmp_path: Path, wires: list[LiveWire], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.turns.turns.GRACE_S", 0.01)
    async with serving_on(tmp_path, wires) as server:
        begun = ask(server, "begun", stream=True)
        await until(lambda: running(wires) == 1)
        await die(wires)
        late = ask(server, "late")
        await waits(server, 2)
        begun.cancel()  # over ASGI, cancelling is a disconnect
        late.cancel()
        await waits(server, 0)
        await until(lambda: not server.app.state.turns.running.busy)
        assert [turn["status"] for turn in await server.tree("begun")] == ["aborted"]
        await wires[0].start()
        assert (await ask(server, "next", most=SHORT)).status_code == 200
        asked = [request.sampling.max_tokens for request in wires[0].wire.engine.requests]
        assert asked == [1, SHORT]  # the server's proof; nobody else was submitted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_before_a_server_is_alive_leaves_nothing_behind(
    tmp_path: Path, wires: list[LiveWire], stream: bool
) -> None:
    async with serving_on(tmp_path, wires) as server:
        await die(wires)
        await until(lambda: not server.engine.alive)  # type: ignore[attr-defined]
        left = asyncio.Event()
        parts = [{"type": "http.request", "body": json.dumps({"messages": [user("hi")], "stream": stream}).encode()}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None: ...

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        path = "/s/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers,
                 "query_string": b"", "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1)}  # fmt: skip
        asking = asyncio.create_task(server.app(scope, receive, send))
        await waits(server, 1)
        left.set()
        await asking
        assert await shown(server) == 0 and (await server.http.get("/rl/sessions")).json()["sessions"] == []


async def test_a_server_that_answers_wrong_is_replaced_by_another_one(tmp_path: Path, wires: list[LiveWire]) -> None:
    """From the tokens before the wrong one; a session that only wrong servers answer stores nothing to train."""

    def wrong(reply: CollectedReply, wanted: Any) -> Any:
        meta = SglangWire.meta(wires[0].wire, wanted, reply)
        if len(reply.ids) > 10:
            reply.ids[10] = meta["output_token_logprobs"][10][1] = 1_000_000
        return meta

    async with serving_on(tmp_path, wires) as server:
        wires[0].wire.meta = lambda wanted, reply: wrong(reply, wanted)
        answers = await asyncio.gather(*(ask(server, f"a{n}", stream=bool(n % 2), most=FIRST) for n in range(4)))
        assert {answer.status_code for answer in answers} == {200}
        for n in range(4):
            await check_exact(server, f"a{n}", FIRST)
        await wires[1].kill()
        await until(lambda: server.engine.servers()[1]["state"] == "ejected")  # type: ignore[attr-defined]
        alone = await ask(server, "alone", most=FIRST)
        assert alone.status_code == 502 and "token 1000000" in alone.json()["error"]["message"]
        assert [turn["status"] for turn in await server.tree("alone")] == ["failed"]


async def test_a_shutdown_does_not_wait_for_servers(tmp_path: Path, wires: list[LiveWire]) -> None:
    begun_at = time.monotonic()
    async with serving_on(tmp_path, wires, shutdown_timeout_s=3600.0) as server:
        begun = ask(server, "begun")
        await until(lambda: running(wires) == 1)
        await die(wires)
        late = ask(server, "late")
        await waits(server, 2)
        await server.app.state.turns.drain(3600.0)
        for refused in (await begun, await late):
            assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
    assert time.monotonic() - begun_at < 3600.0


async def test_a_pause_that_overlaps_with_an_outage_gives_each_token_its_version(
    tmp_path: Path, wires: list[LiveWire]
) -> None:
    async with serving_on(tmp_path, wires) as server:
        await server.ok("/engine/update_weights", {"path": "w", "version": 3})
        begun = ask(server, "begun", stream=True)
        await until(lambda: running(wires) == 1)
        await server.ok("/engine/pause_generation", {})
        await die(wires)
        late = ask(server, "late")
        await waits(server, 1)
        unloaded = await server.post("/engine/update_weights", {"path": "w", "version": 4})
        assert unloaded.status_code == 503 and await shown(server, "paused") == "abort"
        await wires[0].start()
        await until(lambda: server.engine.alive)  # type: ignore[attr-defined]
        await server.ok("/engine/update_weights", {"path": "w", "version": 5})
        await die(wires[:1])
        await server.ok("/engine/continue_generation", {})
        await waits(server, 2)
        await wires[1].start()
        assert (await begun).status_code == (await late).status_code == 200
        [first], [second] = [await check_exact(server, name, LONG) for name in ("begun", "late")]
        assert first["versions"][slice(*first["turns"][0]["span"])] == [3] * FIRST + [5] * (LONG - FIRST)
        assert set(second["versions"][slice(*second["turns"][0]["span"])]) == {5}
        loaded = [body["weight_version"] for path, body in wires[1].wire.calls if path == "/update_weights_from_disk"]
        assert loaded == ["5"]


async def test_memory_that_was_released_when_all_servers_died_is_taken_back(
    tmp_path: Path, wires: list[LiveWire]
) -> None:
    async with serving_on(tmp_path, wires) as server:
        begun = ask(server, "begun")
        await until(lambda: running(wires) == 1)
        await server.ok("/engine/release_memory", {})
        await die(wires)
        await until(lambda: not server.engine.alive)  # type: ignore[attr-defined]
        assert (await server.ok("/engine/resume_memory", {}))["released"] == []
        await waits(server, 1)
        await wires[0].start()
        assert (await begun).status_code == 200
        await check_exact(server, "begun", LONG)


async def test_requests_wait_for_a_new_server_when_the_last_was_removed(tmp_path: Path, wires: list[LiveWire]) -> None:
    async with serving_on(tmp_path, wires[:1]) as server:
        await server.http.request("DELETE", "/engine/servers", json={"url": wires[0].url})
        late = ask(server, "late", most=SHORT)
        await waits(server, 1)
        await server.ok("/engine/servers", {"url": wires[1].url})
        assert (await late).status_code == 200
        await check_exact(server, "late", SHORT)


@pytest.mark.parametrize("hung", [False, True], ids=["killed", "silent"])
async def test_an_outage_of_many_servers_is_no_loss_for_each(tmp_path: Path, hung: bool, monkeypatch: Any) -> None:
    """More servers die than a request may lose."""
    async with stalling(8, monkeypatch) as many, serving_on(tmp_path, many) as server:
        begun = [ask(server, f"a{n}", stream=bool(n % 2)) for n in range(8)]
        await until(lambda: running(many) == 8)
        await die(many, hung=hung)
        await waits(server, 8)
        if hung:
            await die(many)
        await many[3].start()
        assert {answer.status_code for answer in await asyncio.gather(*begun)} == {200}
        for n in range(8):
            await check_exact(server, f"a{n}", LONG)
