"""`/engine/...` over HTTP: the administrator pauses and updates the engine, and running agents notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.interface import Capability
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply, Script
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.settings import Settings
from tests.engines.scripts import VOCABULARY
from tests.engines.wire import serving_wire
from tests.support import Server, default_url, let_pass, sampled, says, serving, tiny_renderer, until, user
from tests.wide import CROSSED
from tokengrove.errors import EngineFailed, InvalidRequest

MODES = ["in_place", "retract", "abort", "drain"]
TEXT = "one two three four five six seven eight nine ten"
WORDS = list(sampled(TEXT))
ADMIN = {"authorization": "Bearer admin"}


def goes_on(delay_s: float = 0.002) -> Script:
    """A script that says TEXT and continues after an interruption: the tokens so far are at the end of the prompt."""

    def script(request: GenerateRequest) -> Reply:
        ids = list(request.input_ids)
        done = next((n for n in range(len(WORDS) - 1, 0, -1) if ids[-n:] == WORDS[:n]), 0)
        return Reply(sampled(TEXT)[done:], delay_s=delay_s)

    return script


@contextlib.asynccontextmanager
async def serving_on(folder: Path, engine: Any, **settings: Any) -> AsyncIterator[Server]:
    """An app on the engine of a test."""
    configured = Settings(**{"database_url": default_url(folder), "migrate": True, **settings})
    app = build_app(configured, engine=engine, renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        yield Server(app, http, engine)


async def state(server: Server) -> Any:
    response = await server.http.get("/engine")
    assert response.status_code == 200, response.text
    return response.json()


async def error_of(server: Server, path: str, body: Any, status: int, **more: Any) -> Any:
    response = await server.post(path, body, **more)
    assert response.status_code == status, response.text
    return response.json()["error"]


async def begun(server: Server, *sessions: str) -> list[asyncio.Task[Any]]:
    """Start a unary turn in each session, and wait until all run in the engine."""
    tasks = [asyncio.create_task(server.chat([user("go")], session)) for session in sessions]
    await until(lambda: len(server.engine.running) == len(sessions))
    return tasks


def sampled_by(server: Server) -> list[int]:
    """The number of tokens that each running turn has so far."""
    return [len(turn.interaction.output_ids) for turn in server.app.state.turns.running._turns]


async def streamed(server: Server, session: str) -> tuple[str, str]:
    """The text and finish reason of a finished streamed turn."""
    body = {"model": "m", "messages": [user("go")], "stream": True}
    response = await server.post(f"/{session}/v1/chat/completions", body)
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n"), response.text
    choices = [json.loads(line[6:])["choices"] for line in response.text.split("\n\n")[:-2]]
    deltas = [choice for part in choices for choice in part]
    return "".join(c["delta"].get("content") or "" for c in deltas), deltas[-1]["finish_reason"]


# Access and bad input ----------------------------------------------------------------------------------------------

POSTS = [
    "pause_generation", "continue_generation", "update_weights", "init_weights_update_group",
    "destroy_weights_update_group", "begin_weight_update", "update_weights_from_tensor",
    "update_weights_from_distributed", "end_weight_update", "release_memory", "resume_memory", "flush_cache", "servers",
]  # fmt: skip
ROUTES = [("POST", f"/engine/{name}") for name in POSTS]
ROUTES += [(method, f"/engine/{name}") for method in ("GET", "DELETE") for name in ("servers", "adapters")]
ROUTES += [("GET", "/engine"), ("POST", "/engine/adapters")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_only_the_administrator_controls_the_engine(tmp_path: Path, method: str, path: str) -> None:
    async with serving(tmp_path, says("fine"), admin_key="admin") as server:
        mine = await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)
        keys = {None: 401, "wrong": 403, mine["api_key"]: 403, mine["control_key"]: 403}
        for key, status in keys.items():
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            content = b"\xff" if method == "POST" else None
            response = await server.http.request(method, path, headers=headers, content=content)
            assert response.status_code == status, (key, response.text)
        shown = (await server.http.get("/engine", headers=ADMIN)).json()
        assert (shown["paused"], shown["version"]) == (None, 0)


WRONG: list[tuple[str, Any, str]] = [
    ("update_weights", {}, "path"),
    ("update_weights", {"path": ""}, "path"),
    ("update_weights", {"path": 5}, "path"),
    ("update_weights", {"path": "w\0"}, "path"),
    ("update_weights", {"path": "w", "version": -1}, "version"),
    ("update_weights", {"path": "w", "version": "1"}, "version"),
    ("update_weights", {"path": "w", "version": 2**31}, "version"),
    ("update_weights", {"path": "w", "version": True}, "version"),
    ("update_weights", {"path": "w", "mode": "gently"}, "mode"),
    ("update_weights", {"path": "w", "mode": ["abort"]}, "mode"),
    ("pause_generation", {"mode": "none"}, "mode"),
    ("pause_generation", {"mode": {}}, "mode"),
    ("pause_generation", {"mode": 0}, "mode"),
    ("release_memory", {"mode": "in_place"}, "mode"),
    ("release_memory", {"mode": "retract"}, "mode"),
    ("release_memory", {"tags": "weights"}, "tags"),
    ("release_memory", {"tags": ["everything"]}, "tags"),
    ("release_memory", {"tags": [1]}, "tags"),
    ("resume_memory", {"tags": ["everything"]}, "tags"),
    ("begin_weight_update", {"version": "x"}, "version"),
    ("servers", {}, "url"),
    ("servers", {"url": "localhost:1"}, "url"),
    ("servers", {"url": 5}, "url"),
    *((name, [1], "body") for name in POSTS),
    *((name, "x", "body") for name in POSTS),
]


async def test_a_wrong_field_is_named_and_nothing_changes(tmp_path: Path) -> None:
    wrong = []
    async with serving(tmp_path, says("fine")) as server:
        before = await state(server)
        for name, body, param in WRONG:
            response = await server.post(f"/engine/{name}", body)
            named = response.json().get("error", {}).get("param")
            if (response.status_code, named, await state(server)) != (400, param, before):
                wrong.append((name, body, response.text))
        assert not wrong, wrong
        assert (await server.answer([user("hi")]))["content"] == "fine"


async def test_the_state_describes_the_engine(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on(0.02)) as server:
        (task,) = await begun(server, "a")
        shown = await state(server)
        assert (shown["engine"], shown["version"], shown["paused"]) == ("scripted", 0, None)
        assert (shown["in_flight"], shown["waiting"], shown["released"]) == (1, 0, [])
        assert {"update_weights", "release_memory"} <= set(shown["capabilities"])
        await task
        assert (await state(server))["in_flight"] == 0


# Pauses ------------------------------------------------------------------------------------------------------------


async def test_a_server_whose_engine_has_died_is_not_ready(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on()) as server:
        server.engine.failure = ""  # type: ignore[attr-defined]
        assert (await server.http.get("/ready")).status_code == 200
        server.engine.failure = "the engine's batching thread has ended: out of memory"  # type: ignore[attr-defined]
        refused = await server.http.get("/ready")
        assert refused.status_code == 503
        assert "has ended: out of memory; restart the server" in refused.json()["error"]["message"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_paused_server_reports_it_and_requests_wait(tmp_path: Path, mode: str) -> None:
    async with serving(tmp_path, goes_on()) as server:
        ready = (await server.http.get("/ready")).json()
        assert ready["status"] == "ready"
        shown = await server.ok("/engine/pause_generation", {"mode": mode})
        assert shown["paused"] == mode
        response = await server.http.get("/ready")
        assert response.json()["status"] == "paused"
        waiting = asyncio.create_task(server.chat([user("go")], "a"))
        raw = asyncio.create_task(server.ok("/v1/generate", {"input_ids": [1, 2]}))
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 2)
        assert (await state(server))["waiting"] == 2 and not server.engine.requests
        assert (await server.ok("/engine/continue_generation", {}))["paused"] is None
        assert (await waiting)["choices"][0]["message"]["content"] == TEXT
        assert (await raw)["output_ids"] == WORDS
        assert (await server.http.get("/ready")).json()["status"] == "ready"


async def test_pausing_and_continuing_twice_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on()) as server:
        await server.ok("/engine/continue_generation", {})
        assert (await server.ok("/engine/pause_generation", {"mode": "drain"}))["paused"] == "drain"
        assert (await server.ok("/engine/pause_generation", {"mode": "abort"}))["paused"] == "drain"
        for _ in range(2):
            assert (await server.ok("/engine/continue_generation", {}))["paused"] is None
        assert (await server.answer([user("go")]))["content"] == TEXT


PATHS: list[tuple[str, dict[str, Any], int]] = [
    ("/a/v1/chat/completions", {"model": "m", "messages": [user("go")]}, 503),
    ("/a/v1/chat/completions", {"model": "m", "messages": [user("go")], "stream": True}, 503),
    ("/a/v1/responses", {"model": "m", "input": "go"}, 503),
    ("/a/v1/messages", {"model": "m", "messages": [user("go")], "max_tokens": 9}, 529),
    ("/a/v1/generate", {"input_ids": [1, 2]}, 503),
    ("/v1/generate", {"input_ids": [1, 2]}, 503),
]


@pytest.mark.parametrize(("path", "body", "status"), PATHS)
async def test_a_request_that_waits_too_long_is_refused_and_may_retry(
    tmp_path: Path, path: str, body: dict[str, Any], status: int
) -> None:
    async with serving(tmp_path, goes_on(), pause_timeout_s=0.05) as server:
        await server.ok("/engine/pause_generation", {})
        response = await server.post(path, body)
        assert response.status_code == status, response.text
        assert 1 <= int(response.headers["retry-after"]) <= 30
        assert response.headers["x-should-retry"] == "true"
        assert "paused" in response.json()["error"]["message"]
        assert server.engine.requests == [] and (await state(server))["waiting"] == 0
        assert (await server.http.get("/rl/sessions")).json()["sessions"] == []  # the refused request left no trace
        await server.ok("/engine/continue_generation", {})
        assert (await server.post(path, body)).status_code == 200


@pytest.mark.parametrize("mode", MODES)
async def test_a_pause_in_the_middle_of_replies_loses_no_token(tmp_path: Path, mode: str) -> None:
    async with serving(tmp_path, goes_on()) as server:
        tasks = await begun(server, "a", "b")
        stream = asyncio.create_task(streamed(server, "c"))
        await until(lambda: len(server.engine.running) == 3)
        await server.ok("/engine/pause_generation", {"mode": mode})
        await server.ok("/engine/continue_generation", {})
        assert {reply["choices"][0]["message"]["content"] for reply in await asyncio.gather(*tasks)} == {TEXT}
        assert await stream == (TEXT, "stop")


async def test_equal_requests_that_wait_during_a_pause_are_separate_samples(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on()) as server:
        await server.ok("/engine/pause_generation", {})
        asked = [asyncio.create_task(server.chat([user("go")])) for _ in range(6)]
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 6)
        await server.ok("/engine/continue_generation", {})
        assert len({reply["id"] for reply in await asyncio.gather(*asked)}) == 6
        assert sorted(node["reason"] for node in await server.tree()) == ["first", *["resampled"] * 5]


async def test_a_marked_retry_and_its_original_that_wait_during_a_pause_share_one_sample(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on()) as server:
        await server.ok("/engine/pause_generation", {})
        body = {"model": "m", "messages": [user("go")]}
        headers = [{}, {"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "2"}]
        asked = [asyncio.create_task(server.ok("/s/v1/chat/completions", body, headers=each)) for each in headers]
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 3)
        await server.ok("/engine/continue_generation", {})
        assert len({reply["id"] for reply in await asyncio.gather(*asked)}) == 1
        assert len(server.engine.requests) == 1


async def test_a_session_that_ends_in_a_pause_takes_no_turn_afterwards(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on()) as server:
        await server.answer([user("go")])
        await server.ok("/engine/pause_generation", {})
        late = asyncio.create_task(server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("x")]}))
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 1)
        await server.ok("/s/rl/end_session", {"reward": 1.0})  # rewarding and ending need no engine
        await server.ok("/engine/continue_generation", {})
        assert (await late).json()["error"]["code"] == "session_closed"
        assert len(await server.export()) == 1


async def test_a_pause_does_not_count_as_engine_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, goes_on(), engine_timeout_s=60.0) as server:
        (task,) = await begun(server, "a")
        await server.ok("/engine/pause_generation", {"mode": "in_place"})
        await let_pass(3600.0, monkeypatch)
        await server.ok("/engine/continue_generation", {})
        assert (await task)["choices"][0]["message"]["content"] == TEXT


async def test_waiting_requests_count_against_the_turns_in_flight(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on(), max_turns_in_flight=2) as server:
        await server.ok("/engine/pause_generation", {})
        asked = [asyncio.create_task(server.chat([user("go")], f"s{n}")) for n in range(2)]
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 2)
        refused = await server.post("/s9/v1/chat/completions", {"model": "m", "messages": [user("go")]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        await server.ok("/engine/continue_generation", {})
        assert len(await asyncio.gather(*asked)) == 2


# Weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_running_turns_survive_an_update_and_each_token_has_its_version(tmp_path: Path, mode: str) -> None:
    async with serving(tmp_path, goes_on()) as server:
        tasks = await begun(server, "a", "b")
        streams = [asyncio.create_task(streamed(server, session)) for session in ("c", "d")]
        await until(lambda: sum(count >= 2 for count in sampled_by(server)) == 4)
        updated = await server.ok("/engine/update_weights", {"path": "w", "version": 3, "mode": mode})
        assert (updated["version"], updated["paused"]) == (3, None)
        assert {reply["choices"][0]["message"]["content"] for reply in await asyncio.gather(*tasks)} == {TEXT}
        assert await asyncio.gather(*streams) == [(TEXT, "stop")] * 2
        for session in "abcd":
            (sample,) = await server.export(session)
            trained = [at for at, mask in enumerate(sample["loss_mask"]) if mask]
            assert [sample["input_ids"][at] for at in trained] == WORDS
            versions = [sample["versions"][at] for at in trained]
            assert versions == sorted(versions)
            assert set(versions) == ({0} if mode == "drain" else {0, 3}), (session, versions)
        later = await server.chat([user("go")], "later")
        (sample,) = await server.export("later")
        assert set(sample["versions"]) == {-1, 3} and later["choices"]


@pytest.mark.parametrize("name", ["path", "model_path"])
async def test_a_version_is_the_given_one_or_one_more(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, says()) as server:
        said = [await server.ok("/engine/update_weights", {name: "w", **more}) for more in ({}, {"version": 9}, {})]
        assert [each["version"] for each in said] == [1, 9, 10]
        assert (await server.http.get("/ready")).json()["version"] == 10


async def test_an_update_in_a_pause_leaves_it_paused(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on()) as server:
        await server.ok("/engine/pause_generation", {"mode": "in_place"})
        updated = await server.ok("/engine/update_weights", {"path": "w"})
        assert (updated["paused"], updated["version"]) == ("in_place", 1)
        await server.ok("/engine/continue_generation", {})


class Failing(ScriptedEngine):
    """An engine whose updates fail with `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(goes_on(), vocab_size=tiny_renderer().vocab_size)
        self.error = error

    async def update_weights(self, path: str, version: int | None = None) -> int:
        raise self.error


@CROSSED
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("the folder holds no weights", param="path"), 400),
        (EngineFailed("the weights do not fit"), 502),
        (MemoryError("out of memory"), 500),
    ],
    ids=["refused", "failed", "crashed"],
)
async def test_an_update_that_fails_leaves_the_server_serving_the_old_weights(
    tmp_path: Path, mode: str, error: Exception, status: int
) -> None:
    async with serving_on(tmp_path, Failing(error)) as server:
        (task,) = await begun(server, "a")
        await error_of(server, "/engine/update_weights", {"path": "w", "version": 3, "mode": mode}, status)
        shown = await state(server)
        assert (shown["paused"], shown["version"]) == (None, 0)
        assert (await task)["choices"][0]["message"]["content"] == TEXT
        (sample,) = await server.export("a")
        assert set(sample["versions"]) == {-1, 0}
        assert (await server.answer([user("go")], "b"))["content"] == TEXT


async def test_concurrent_updates_run_one_after_the_other(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on()) as server:
        tasks = await begun(server, "a", "b")
        bodies = [{"path": "w", "mode": MODES[n % 4]} for n in range(8)]
        said = await asyncio.gather(*(server.ok("/engine/update_weights", body) for body in bodies))
        assert sorted(each["version"] for each in said) == list(range(1, 9))
        await asyncio.gather(*tasks)
        assert (await state(server))["paused"] is None


# Missing capabilities ----------------------------------------------------------------------------------------------

CANNOT: list[tuple[str, Mapping[str, Any], str]] = [
    ("begin_weight_update", {"version": 1}, "begin_weight_update"),
    ("update_weights_from_tensor", {}, "update_weights_from_tensor"),
    ("servers", {"url": "http://127.0.0.1:9"}, "--engine URL"),
]


@pytest.mark.parametrize(("name", "body", "said"), CANNOT)
async def test_a_missing_capability_is_refused_and_interrupts_no_turn(
    tmp_path: Path, name: str, body: Mapping[str, Any], said: str
) -> None:
    async with serving(tmp_path, goes_on()) as server:
        (task,) = await begun(server, "a")
        error = await error_of(server, f"/engine/{name}", dict(body), 501)
        assert said in error["message"] and error["code"] == "engine_incapable"
        shown = await state(server)
        assert (shown["paused"], shown["released"]) == (None, [])
        assert (await task)["choices"][0]["message"]["content"] == TEXT
        assert len(server.engine.requests) == 1  # no turn was interrupted


async def test_memory_is_refused_by_an_engine_that_cannot_release_it_before_any_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, goes_on()) as server:
        lacking = replace(server.engine.info(), capabilities=frozenset(Capability) - {Capability.RELEASE_MEMORY})
        monkeypatch.setattr(server.engine, "info", lambda: lacking)
        (task,) = await begun(server, "a")
        for path in ("/engine/release_memory", "/engine/resume_memory"):
            error = await error_of(server, path, {}, 501)
            assert "enable_memory_saver" in error["message"] and error["code"] == "engine_incapable"
        assert (await task)["choices"][0]["message"]["content"] == TEXT and len(server.engine.requests) == 1


async def test_an_engine_without_memory_sleeps_as_a_pause(tmp_path: Path) -> None:
    """A trainer's sleep and wake_up, with a request that waits between them."""
    async with serving(tmp_path, goes_on()) as server:
        asleep = await server.ok("/engine/release_memory", {"tags": ["weights", "kv_cache"]})
        assert (asleep["released"], asleep["paused"]) == (["kv_cache", "weights"], "abort")
        task = asyncio.create_task(server.chat([user("go")], "a"))
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 1)
        half = await server.ok("/engine/resume_memory", {"tags": ["weights"]})
        assert (half["released"], half["paused"]) == (["kv_cache"], "abort")
        assert (await server.ok("/engine/update_weights", {"path": "w", "version": 3}))["paused"] == "abort"
        awake = await server.ok("/engine/resume_memory", {"tags": ["kv_cache"]})
        assert (awake["released"], awake["paused"], awake["version"]) == ([], None, 3)
        assert (await task)["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_server_endpoints_are_refused_without_a_pool(tmp_path: Path, method: str) -> None:
    async with serving(tmp_path, says()) as server:
        content = json.dumps({"url": "http://127.0.0.1:9"})
        response = await server.http.request(method, "/engine/servers", content=content)
        assert response.status_code == 501 and "--engine URL" in response.json()["error"]["message"]


async def test_the_cache_can_be_flushed_while_turns_run(tmp_path: Path) -> None:
    async with serving(tmp_path, goes_on()) as server:
        (task,) = await begun(server, "a")
        assert (await server.ok("/engine/flush_cache", {}))["paused"] is None
        assert (await task)["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize("path", ["/engine/", "/engine/pause", "/engine/servers/1", "/engine/v1/chat/completions"])
async def test_other_paths_below_engine_are_404(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says()) as server:
        response = await server.post(path, {"model": "m", "messages": [user("go")]})
        assert response.status_code in (307, 400, 404), response.text
        assert server.engine.requests == []


async def test_a_request_that_waits_for_a_paused_engine_keeps_its_session_in_use(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.chat([user("a")])
        await server.ok("/engine/pause_generation", {"mode": "in_place"})
        live = server.app.state.registry.find("s")
        asked = asyncio.ensure_future(server.chat([user("b")]))
        await until(lambda: live.waiting == 1)  # so it neither expires nor leaves memory
        live.used_at -= 3600
        await server.ok("/engine/continue_generation", {})
        await asked
        assert live.waiting == 0 and live.used_at > time.monotonic() - 1800


async def test_vllms_weight_transfer_goes_through_the_api_and_update_weights_is_one_of_its_steps(
    tmp_path: Path,
) -> None:
    async with serving_wire("vllm") as (url, wire):
        pool = Pool([url], connect(VOCABULARY, None), start_timeout_s=30.0)
        async with serving_on(tmp_path, pool) as server:
            await server.ok("/engine/pause_generation", {"mode": "in_place"})
            await server.ok("/engine/start_weight_update", {})
            await server.ok("/engine/update_weights", {"update_info": {"names": ["a"]}})
            told = await server.ok("/engine/finish_weight_update", {"version": 4})
            await server.ok("/engine/continue_generation", {})
        steps = [path for path, _ in wire.calls if path.endswith(("_weight_update", "/update_weights"))]
        assert steps == ["/start_weight_update", "/update_weights", "/finish_weight_update"] and told["version"] == 4
