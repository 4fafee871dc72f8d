"""Two workers of one server act as one, whichever of them answers. A test asks each of them by its own client."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import proxy.turns.turns
from proxy.engine.interface import PauseMode
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply
from proxy.telemetry.metrics import Metrics
from proxy.workers import common_metrics
from tests.engines.scripts import following
from tests.engines.wire import LiveWire
from tests.exports import entries
from tests.support import sampled, tiny_renderer, until, user
from tests.wide import CROSSED, WIDE, first
from tests.workers import Workers, workers_of

LONG = {"model": "m", "messages": [user("hi")], "max_tokens": 60}
CHAT = "/s/v1/chat/completions"
RETRY = {"x-stainless-retry-count": "1"}
MARKS: list[dict[str, str]] = [RETRY, {"idempotency-key": "k"}]


@pytest.fixture
def url(postgres_url: str) -> str:
    """The URL of a migrated Postgres database."""
    return postgres_url


@pytest.fixture
async def wire() -> AsyncIterator[LiveWire]:
    """A simulated SGLang server that takes 5 ms per token."""
    live = LiveWire(delay_s=0.005)
    await live.start()
    yield live
    await live.kill()


def calls(wire: LiveWire, path: str) -> list[Any]:
    return [body for name, body in wire.wire.calls if name == path]


async def state(workers: Workers, number: int) -> Any:
    response = await workers[number].http.get("/engine")
    assert response.status_code == 200, response.text
    return response.json()


async def begun(workers: Workers, wire: LiveWire, *names: str, **more: Any) -> list[asyncio.Task[Any]]:
    """Start a turn of a session on each worker in turn, and wait until the server samples them."""
    turns = [
        asyncio.create_task(workers[n % 2].chat([user("go")], name, max_tokens=200, **more))
        for n, name in enumerate(names)
    ]
    await until(lambda: len(wire.wire.engine.running) == len(names))
    return turns


# The engine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "mode"), [(0, "abort"), (1, "in_place"), pytest.param(1, "drain", marks=WIDE)])
async def test_an_update_by_any_worker_is_done_once_and_leaves_each_token_its_version(
    tmp_path: Path, url: str, wire: LiveWire, asked: int, mode: str
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        turns = await begun(workers, wire, "a", "b", "c", "d")
        assert (await state(workers, asked))["in_flight"] == 4
        done = await workers[asked].ok("/engine/update_weights", {"path": "w", "version": 5, "mode": mode})
        assert (done["version"], done["paused"]) == (5, None)
        assert [body["weight_version"] for body in calls(wire, "/update_weights_from_disk")] == ["5"]
        assert len(calls(wire, "/flush_cache")) == (mode != "in_place")
        await asyncio.gather(*turns)
        for number in (0, 1):
            ready = (await workers[number].http.get("/ready")).json()
            assert (ready["status"], ready["version"]) == ("ready", 5)
            await workers[number].chat([user("after")], f"after-{number}", max_tokens=5)
        for name in "abcd":
            (sample,) = await workers[0].export(name)
            ids, (start, end) = sample["input_ids"], sample["turns"][0]["span"]
            assert ids[start:end] == following(ids[:start], 200)
            versions = sample["versions"][start:end]
            assert versions == sorted(versions) and set(versions) == ({0} if mode == "drain" else {0, 5})
            assert "version" not in sample["turns"][0]
        for number in (0, 1):
            (sample,) = await workers[number].export(f"after-{number}")
            assert set(sample["versions"][sample["turns"][0]["span"][0] :]) == {5}


@pytest.mark.parametrize("mode", first(["in_place", "retract"]))
async def test_without_spans_the_part_in_which_the_weights_changed_is_old_and_uncertain_on_every_worker(
    tmp_path: Path, url: str, wire: LiveWire, mode: str
) -> None:
    wire.wire.tells_spans = False
    body = {"model": "m", "messages": [user("go")], "max_tokens": 200, "stream": True}
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        turns = [
            asyncio.create_task(workers[n].post(f"/{name}/v1/chat/completions", body)) for n, name in enumerate("ab")
        ]
        await until(lambda: len(wire.wire.engine.running) == 2)
        whole = asyncio.create_task(workers[0].chat([user("go")], "w", max_tokens=200))  # its answer is one part
        await until(lambda: len(wire.wire.engine.running) == 3)
        await workers[1].ok("/engine/update_weights", {"path": "w", "version": 5, "mode": mode})
        await asyncio.gather(*turns, whole)
        for name in "abw":
            (sample,) = await workers[0].export(name)
            versions = sample["versions"][slice(*sample["turns"][0]["span"])]
            assert versions == sorted(versions) and set(versions) == ({0} if name == "w" else {0, 5})
            assert sample["turns"][0]["version"] == "uncertain"
            assert await workers[0].export(name, filter={"min_version": 0}) == []
        (turn,) = await workers[1].tree("a")
        assert turn["notes"]["version"] == "uncertain"


async def test_a_pause_holds_all_workers_and_either_ends_it(tmp_path: Path, url: str, wire: LiveWire) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        turns = await begun(workers, wire, "a", "b")
        assert (await workers[1].ok("/engine/pause_generation", {}))["paused"] == "abort"
        assert not wire.wire.engine.running
        waiting = [asyncio.create_task(workers[n].chat([user("hi")], f"w{n}", max_tokens=5)) for n in (0, 1)]
        await until(lambda: sum(workers[n].app.state.turns.routes.main.gate.waiting for n in (0, 1)) == 2)
        for number in (0, 1):
            shown = await state(workers, number)
            assert (shown["paused"], shown["in_flight"], shown["waiting"]) == ("abort", 0, 2)
            assert (await workers[number].http.get("/ready")).json()["status"] == "paused"
        assert not wire.wire.engine.running
        await workers[0].ok("/engine/continue_generation", {})
        await asyncio.gather(*turns, *waiting)
        assert (await workers[1].http.get("/ready")).json()["status"] == "ready"


async def test_an_update_that_the_server_refuses_lets_all_workers_go_on(
    tmp_path: Path, url: str, wire: LiveWire
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        turns = await begun(workers, wire, "a", "b")
        refused = await workers[1].post("/engine/update_weights", {"path": "missing"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "path")
        await asyncio.gather(*turns)


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_worker_that_starts_again_takes_over_the_pause_and_the_weights(
    tmp_path: Path, url: str, wire: LiveWire, lost: int
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        await workers[0].ok("/engine/update_weights", {"path": "w", "version": 5})
        await workers[0].ok("/engine/pause_generation", {"mode": "in_place"})
        await workers.stop(lost)
        await workers.start(lost)
        for number in (0, 1):
            assert (await workers[number].http.get("/ready")).json()["status"] == "paused"
        assert ((await state(workers, 1))["paused"], (await state(workers, 1))["version"]) == ("in_place", 5)
        turns = [asyncio.create_task(workers[n].chat([user("hi")], f"w{n}", max_tokens=5)) for n in (0, 1)]
        await until(lambda: sum(workers[n].app.state.turns.routes.main.gate.waiting for n in (0, 1)) == 2)
        assert (await workers[1].ok("/engine/continue_generation", {}))["paused"] is None
        await asyncio.gather(*turns)
        assert (await workers[0].ok("/engine/update_weights", {"path": "w"}))["version"] == 6


async def test_a_leader_that_starts_again_answers_once_its_engine_has_started(
    tmp_path: Path, url: str, wire: LiveWire
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        await workers[0].ok("/engine/pause_generation", {})
        await workers.stop(0)
        starting = asyncio.create_task(workers.start(0))
        while (resumed := await workers[1].post("/engine/continue_generation", {})).status_code == 503:
            assert "worker 0" in resumed.text
            await asyncio.sleep(0)
        assert (resumed.status_code, resumed.json()["paused"], starting.done()) == (200, None, True)
        await starting
        await asyncio.gather(*(workers[n].chat([user("hi")], f"w{n}", max_tokens=5) for n in (0, 1)))


@pytest.mark.parametrize("lost", first([0, 1]))
async def test_a_worker_starts_again_after_weights_were_loaded_on_the_server_directly(
    tmp_path: Path, url: str, wire: LiveWire, lost: int
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        await workers[0].ok("/engine/update_weights", {"path": "w", "version": 5})
        wire.wire.version = "6"
        await until(lambda: all(workers[n].app.state.engine.info().weight_version == 6 for n in (0, 1)))
        await workers.stop(lost)
        async with asyncio.timeout(20):
            await workers.start(lost)
        for number in (0, 1):
            assert (await workers[number].http.get("/ready")).json()["version"] == 6


@pytest.mark.parametrize("update", [False, True])
async def test_a_pause_that_was_under_way_when_the_leader_died_is_undone(
    tmp_path: Path, url: str, wire: LiveWire, update: bool
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        if update:
            await workers[1].ok("/engine/update_weights", {"path": "w", "version": 5})
        await workers[1].app.state.turns.routes.main.gate.hold(
            PauseMode.DRAIN
        )  # as if the leader had asked for it, and died
        turn = asyncio.create_task(workers[1].chat([user("go")], "a", max_tokens=5))
        await workers.stop(0)
        await workers.start(0)
        assert (await workers[1].http.get("/ready")).json()["status"] == "ready"
        await turn


@pytest.mark.parametrize("lost", [None, 0])
async def test_memory_is_released_and_resumed_once_for_all_workers(
    tmp_path: Path, url: str, wire: LiveWire, lost: int | None
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        done = await workers[1].ok("/engine/release_memory", {"tags": ["kv_cache"]})
        assert (done["released"], done["paused"]) == (["kv_cache"], "abort")
        if lost is not None:
            await workers.stop(lost)
            await workers.start(lost)
        assert (await state(workers, 1))["released"] == ["kv_cache"]
        refused = await workers[1].post("/engine/continue_generation", {})
        assert (refused.status_code, "memory is released" in refused.text) == (503, True)
        turns = [asyncio.create_task(workers[n].chat([user("hi")], f"w{n}", max_tokens=5)) for n in (0, 1)]
        await until(lambda: sum(workers[n].app.state.turns.routes.main.gate.waiting for n in (0, 1)) == 2)
        done = await workers[0].ok("/engine/resume_memory", {})
        assert (done["released"], done["paused"]) == ([], None)
        await asyncio.gather(*turns)
        assert calls(wire, "/release_memory_occupation") == [{"tags": ["kv_cache"]}]
        assert calls(wire, "/resume_memory_occupation") == [{"tags": ["kv_cache"]}]


async def test_servers_that_join_and_leave_do_so_for_all_workers(tmp_path: Path, url: str, wire: LiveWire) -> None:
    more = LiveWire()
    await more.start()
    try:
        async with workers_of(tmp_path, url, engine=wire.url) as workers:
            await workers[1].ok("/engine/servers", {"url": more.url})
            for n in range(8):
                await workers[n % 2].chat([user("hi")], f"s{n}", max_tokens=3)
            for number in (0, 1):
                shown = (await workers[number].http.get("/engine/servers")).json()["servers"]
                assert {server["url"]: server["served"] for server in shown} == {wire.url: 4, more.url: 4}
                assert {server["url"]: server["session_count"] for server in shown} == {wire.url: 4, more.url: 4}
            gone = await workers[0].http.request("DELETE", "/engine/servers", json={"url": wire.url})
            assert [server["url"] for server in gone.json()["servers"]] == [more.url]
            await wire.kill()
            for number in (0, 1):
                await workers[number].chat([user("hi")], f"t{number}", max_tokens=3)
            await wire.start()
    finally:
        await more.kill()


@pytest.mark.wide
async def test_a_pause_that_begins_while_a_server_joins_another_worker_is_the_last_news_there(
    tmp_path: Path, url: str, wire: LiveWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    more, begun, go = LiveWire(), asyncio.Event(), asyncio.Event()
    await more.start()
    try:
        async with workers_of(tmp_path, url, engine=wire.url) as workers:
            pool, adopt = workers[1].app.state.engine, workers[1].app.state.for_workers._steps["adopt"]
            follower = adopt.__self__
            connect = pool._connect

            async def slowly(url: str) -> Any:
                begun.set()
                await go.wait()
                return await connect(url)

            monkeypatch.setattr(pool, "_connect", slowly)
            adding = asyncio.create_task(workers[0].ok("/engine/servers", {"url": more.url}))
            await begun.wait()
            pausing = asyncio.create_task(workers[0].ok("/engine/pause_generation", {"mode": "in_place"}))
            await until(lambda: follower.last.mode is not None)
            go.set()
            await asyncio.gather(adding, pausing)
            assert [(member.paused, member.engine._mode) for member in pool._members] == [
                (True, PauseMode.IN_PLACE),
                (True, PauseMode.IN_PLACE),
            ]
    finally:
        await more.kill()


@pytest.mark.parametrize("mode", first(["abort", "in_place"]))
async def test_a_leader_that_dies_while_weights_are_loaded_leaves_no_pause(
    tmp_path: Path, url: str, wire: LiveWire, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url, shutdown_timeout_s=0.0) as workers:
        loading = asyncio.Event()

        async def load(*_: object) -> None:
            loading.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(workers[0].app.state.engine, "update_weights", load)
        update = asyncio.create_task(workers[0].post("/engine/update_weights", {"path": "w", "mode": mode}))
        await loading.wait()
        turn = asyncio.create_task(workers[1].chat([user("go")], "a", max_tokens=5))
        await until(lambda: workers[1].app.state.turns.routes.main.gate.waiting == 1)
        await workers.stop(0)
        await workers.start(0)
        await turn
        for number in (0, 1):
            assert (await workers[number].http.get("/ready")).json()["status"] == "ready"
        done = await workers[1].ok("/engine/update_weights", {"path": "w", "mode": mode})
        assert (done["version"], done["paused"]) == (1, None)
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)


# Retries ------------------------------------------------------------------------------------------------------------


def slow(delay_s: float = 0.03) -> ScriptedEngine:
    """An engine that says the same thing to everybody, with a delay before each token."""
    reply = Reply(sampled("one two three four five six"), delay_s=delay_s)
    return ScriptedEngine(lambda _: reply, vocab_size=tiny_renderer().vocab_size)


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.turns.turns, "GRACE_S", 0.5)


async def in_flight(workers: Workers, number: int, body: Any = LONG, **headers: str) -> asyncio.Task[Any]:
    engine = workers[number].engine
    before = len(engine.requests)
    task = asyncio.create_task(workers[number].post(CHAT, body, headers=headers))
    await until(lambda: len(engine.requests) > before)
    return task


def sampled_turns(workers: Workers) -> int:
    return sum(len(workers[number].engine.requests) for number in (0, 1))


@CROSSED
@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_marked_retry_attaches_to_the_turn_of_another_worker(
    tmp_path: Path, url: str, mark: dict[str, str], stream: bool
) -> None:
    body = {**LONG, "stream": stream}
    async with workers_of(tmp_path, url, slow) as workers:
        first = await in_flight(workers, 0, body, **({} if mark is RETRY else mark))
        second = await workers[1].post(CHAT, body, headers=mark)
        assert second.status_code == 200
        assert shown(second, stream) == shown(await first, stream)
        assert second.headers["content-type"] == (await first).headers["content-type"]
        assert sampled_turns(workers) == 1
        assert [node["status"] for node in await workers[0].tree()] == ["complete"]


def shown(response: Any, stream: bool) -> Any:
    """The body, or the text and id of a stream: its keep-alives depend on time."""
    if not stream:
        return response.json()
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert response.text.endswith("data: [DONE]\n\n")
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return {event["id"] for event in events}, text


@pytest.mark.parametrize("name", ["-/s", "-/count", "request/s"])
async def test_a_session_of_any_name_is_found_at_another_worker(tmp_path: Path, url: str, name: str) -> None:
    async with workers_of(tmp_path, url, slow) as workers:
        first = asyncio.create_task(workers[0].post(f"/{name}/v1/chat/completions", LONG))
        await until(lambda: len(workers[0].engine.requests) == 1)
        second = await workers[1].post(f"/{name}/v1/chat/completions", LONG, headers=RETRY)
        assert (second.status_code, second.json()) == (200, (await first).json())


async def test_an_answer_of_another_worker_has_the_headers_of_an_own_one(
    tmp_path: Path, url: str, wire: LiveWire
) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        named = {"x-request-id": "r"}
        own, passed_on = [await workers[number].http.get("/engine", headers=named) for number in (0, 1)]
        assert passed_on.headers.raw == own.headers.raw  # the server adds the date


@pytest.mark.usefixtures("_short_grace")
async def test_after_a_disconnect_an_equal_request_attaches_to_the_turn_of_another_worker(
    tmp_path: Path, url: str
) -> None:
    async with workers_of(tmp_path, url, slow) as workers:
        first = await in_flight(workers, 1)
        first.cancel()  # over ASGI, cancelling is a disconnect
        await asyncio.gather(first, return_exceptions=True)
        reply = (await workers[0].post(CHAT, LONG)).json()
        assert reply["choices"][0]["message"]["content"] == "one two three four five six"
        assert sampled_turns(workers) == 1
        assert [node["status"] for node in await workers[0].tree()] == ["complete"]


@pytest.mark.usefixtures("_short_grace")
async def test_if_the_client_of_an_attached_retry_leaves_too_the_turn_ends(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, lambda: slow(delay_s=600.0)) as workers:
        first = await in_flight(workers, 0)
        second = asyncio.create_task(workers[1].post(CHAT, LONG, headers=RETRY))
        (attempts,) = workers[0].app.state.registry.find("s").attempts.values()
        await until(lambda: attempts[0].readers == 2)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await until(lambda: attempts[0].stage == "failed")
        assert not workers[0].engine.running
        assert [node["status"] for node in await workers[1].tree()] == ["aborted"]


async def test_an_unmarked_request_beside_one_that_is_read_is_another_sample(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, slow) as workers:
        first = await in_flight(workers, 0)
        second = await workers[1].post(CHAT, LONG)
        assert second.json()["id"] != (await first).json()["id"]
        assert Counter(node["reason"] for node in await workers[1].tree()) == {"first": 1, "resampled": 1}


async def test_the_turn_of_a_worker_that_died_is_sampled_again(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, slow, shutdown_timeout_s=0) as workers:
        first = await in_flight(workers, 1)
        await workers.stop(1)
        assert (await first).status_code == 503
        second = await workers[0].post(CHAT, LONG, headers=RETRY)
        assert second.status_code == 200
        assert len(workers[0].engine.requests) == 1
        await workers.start(1)


async def test_the_limit_of_turns_in_flight_counts_all_workers(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, slow, max_turns_in_flight=1) as workers:
        first = await in_flight(workers, 0)
        refused = await workers[1].post("/other/v1/chat/completions", LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (await first).status_code == 200
        assert (await workers[1].post("/other/v1/chat/completions", LONG)).status_code == 200


# Claims, the mailbox, metrics ----------------------------------------------------------------------------------------


async def test_claims_at_all_workers_share_the_sessions(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url) as workers:
        for n in range(8):
            await workers[n % 2].chat([user("hi")], f"s{n}")
            await workers[(n + 1) % 2].ok(f"/s{n}/rl/end_session", {"reward": 1.0})
        claims = await asyncio.gather(*(workers[n % 2].ok("/trajectories/claim", {"limit": 2}) for n in range(6)))
        claimed = [name for claim in claims for name in entries(claim)]
        assert sorted(claimed) == [f"s{n}" for n in range(8)]


async def test_letters_of_all_workers_are_fetched_and_answered_at_any(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, engine="mailbox") as workers:
        asked = [workers[n % 2].ask(f"question {n}", f"s{n}") for n in range(4)]
        await until(lambda: workers[0].mailbox.waiting == 4)
        letters = [await workers[n % 2].letter() for n in range(4)]
        assert {letter["session_id"] for letter in letters} == {"s0", "s1", "s2", "s3"}
        assert all(letter["messages"] for letter in letters)
        for n, letter in enumerate(letters):
            await workers[(n + 1) % 2].deliver(letter, text=f"to {letter['session_id']}", version=n)
        replies = await asyncio.gather(*asked)
        assert [reply["choices"][0]["message"]["content"] for reply in replies] == [f"to s{n}" for n in range(4)]
        again = await workers[1].post("/mailbox/deliver", {"request_id": letters[0]["request_id"], "text": "x"})
        assert (again.status_code, "answered already" in again.text) == (400, True)
        failing = workers[1].ask("fail", "f")
        await workers[0].deliver(await workers[1].letter(), error="no")
        with pytest.raises(AssertionError, match="engine_failed"):
            await failing


async def test_letters_are_submitted_again_when_the_leader_is_lost(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, engine="mailbox") as workers:
        asked = workers[1].ask()
        assert (await workers[0].letter())["session_id"] == "s"
        await workers.stop(0)
        await workers.start(0)
        await workers[1].deliver(await workers[1].letter(), text="late")
        assert (await asked)["choices"][0]["message"]["content"] == "late"


@pytest.mark.usefixtures("_short_grace")
async def test_a_letter_of_another_worker_is_withdrawn_when_its_client_leaves(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, engine="mailbox") as workers:
        mailbox = workers[0].mailbox
        asked = workers[1].ask()
        await until(lambda: mailbox.waiting == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: mailbox.waiting == 0)


async def test_a_poll_for_a_session_ends_when_another_worker_ends_the_session(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, engine="mailbox") as workers:
        await workers[0].ok("/rl/start_session", {"session_id": "s", "task_id": "t"})
        polls = [asyncio.create_task(workers[n].poll(session_id="s", wait_s=600)) for n in (0, 1)]
        await until(lambda: workers[0].mailbox.polls == 2)
        await workers[1].ok("/s/rl/end_session", {})
        assert await asyncio.gather(*polls) == [{"status": "ended"}] * 2


async def test_metrics_are_sums_that_no_lost_worker_lowers(tmp_path: Path, url: str) -> None:
    async with workers_of(tmp_path, url, slow) as workers:
        for n in range(3):
            await workers[n % 2].chat([user("hi")], f"s{n}")
        running = await in_flight(workers, 1)
        for number in (0, 1):
            assert (await metrics(workers, number))["tokengrove_in_flight"] == 1.0
        await running
        wanted = await metrics(workers, 0)
        assert wanted == await metrics(workers, 1)
        assert wanted['tokengrove_turns_total{api="chat",status="complete"}'] == 4.0
        assert (wanted["tokengrove_in_flight"], wanted["tokengrove_sessions_in_memory"]) == (0.0, 4.0)
        assert wanted["tokengrove_turn_seconds_count"] == 4.0
        await workers.stop(1)
        left = await metrics(workers, 0)
        assert left == {**wanted, "tokengrove_sessions_in_memory": 2.0, "tokengrove_processes": 1.0}
        await workers.start(1)


async def test_metrics_do_not_wait_for_a_worker_that_hangs(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common_metrics, "_ANSWER_S", 0.5)
    async with workers_of(tmp_path, url, slow) as workers:
        for number in (0, 1):
            await workers[number].chat([user("hi")], f"s{number}")
        wanted = await metrics(workers, 0)
        stuck = asyncio.Event()
        monkeypatch.setitem(workers[1].app.state.for_workers._steps, "count", stuck.wait)
        async with asyncio.timeout(30):
            left = {"tokengrove_sessions_in_memory": 1.0, "tokengrove_processes": 1.0}
            assert await metrics(workers, 0) == {**wanted, **left}


async def metrics(workers: Workers, number: int) -> dict[str, float]:
    """The series of turns and of sessions in memory, and the number of processes: what else there is, never rests."""
    text = (await workers[number].http.get("/metrics")).text
    shown = Metrics()
    names = [family.name for family in (*shown.turns.families(), shown.sessions.in_memory, shown.process.processes)]
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(tuple(names))]
    return {name: float(value) for name, value in lines}


@pytest.mark.parametrize("key", [None, "unknown"])
async def test_workers_choose_the_same_session_for_a_key_and_after_its_end(
    tmp_path: Path, url: str, key: str | None
) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def said(workers: Workers, number: int, text: str, **marks: str) -> str:
        body = {"model": "m", "messages": [user(text)]}
        reply = await workers[number].ok("/v1/chat/completions", body, headers={**headers, **marks})
        return str(reply["id"])

    async def named(workers: Workers) -> list[str]:
        listed = (await workers[0].http.get("/rl/sessions")).json()["sessions"]
        return [entry["session_id"] for entry in listed]

    async with workers_of(tmp_path, url) as workers:
        first = [await said(workers, number, f"turn {number}") for number in (0, 1)]
        [name] = await named(workers)
        assert [node["id"] for node in await workers[0].tree(name)] == first
        for number in range(2):
            assert await workers[number].ok("/rl/set_reward", {"reward": number}, headers=headers)
            await workers[number].ok("/rl/end_session", {}, headers=headers)
            assert await workers[1 - number].ok("/rl/end_session", {}, headers=headers)
            after = await asyncio.gather(*(said(workers, n % 2, f"round {number}, turn {n}") for n in range(4)))
            assert await named(workers) == [name, f"{name}-1", f"{name}-2"][: number + 2]
            assert {node["id"] for node in await workers[number].tree(f"{name}-{number + 1}")} == set(after)
            if not number:
                for asked in (0, 1):
                    assert await said(workers, asked, "turn 0", **RETRY) == first[0]
        await workers.stop(1)
        await workers.start(1)
        assert [await said(workers, number, "last") for number in (1, 0)]
        assert len(await workers[1].tree(f"{name}-2")) == 6


# No engine server ----------------------------------------------------------------------------------------------------


async def test_requests_of_all_workers_wait_while_no_server_is_alive(tmp_path: Path, url: str, wire: LiveWire) -> None:
    async with workers_of(tmp_path, url, engine=wire.url) as workers:
        await workers[1].ok("/engine/update_weights", {"path": "w", "version": 5})
        turns = await begun(workers, wire, "a", "b")
        await wire.kill()
        late = [asyncio.create_task(workers[n].chat([user("hi")], f"late-{n}", max_tokens=5)) for n in (0, 1)]
        await until(lambda: [workers[n].app.state.turns.routes.main.gate.waiting for n in (0, 1)] == [2, 2])
        for number in (0, 1):
            assert (await state(workers, number))["waiting"] == 4
            assert (await workers[number].http.get("/ready")).status_code == 503
            assert (await workers[number].http.get("/health")).status_code == 200
            assert "tokengrove_waiting 4.0" in (await workers[number].http.get("/metrics")).text
        await wire.start()
        await asyncio.gather(*turns, *late)
        assert [body["weight_version"] for body in calls(wire, "/update_weights_from_disk")] == ["5"]
        for name in ("a", "b", "late-0", "late-1"):
            (sample,) = await workers[0].export(name)
            ids, (start, end) = sample["input_ids"], sample["turns"][0]["span"]
            assert ids[start:end] == following(ids[:start], end - start)
            assert set(sample["versions"][start:end]) == {5}
