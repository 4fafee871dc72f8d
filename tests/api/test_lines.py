"""One line for each turn, refusal and other request, at the level that an operator expects."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from proxy.api import request_lines
from proxy.engine.scripted.scripts import Fault, Reply, babble, play
from proxy.store.turn_log import TurnLog
from proxy.turns import turns
from tests.logs import fields_of, lines_of
from tests.support import let_pass, sampled, says, serving, until, user
from tests.workers import workers_of
from tokengrove.errors import StoreUnavailable

CHAT = "/s/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [user("hi")]}


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "proxy")


def levels_of(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.levelname for record in caplog.records if record.msg == event]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_line_of_a_turn_says_what_it_was_and_what_it_took(
    tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.post(CHAT, {**HI, "stream": stream}, headers={"x-request-id": "r-1"})
        (turn,) = fields_of(caplog, "turn")
        seconds = {name: turn.pop(name) for name in ("first_token_s", "total_s")}
        assert 0 <= seconds["first_token_s"] <= seconds["total_s"]
        (stored,) = await server.tree()
        assert turn == {
            **{"session": "s", "interaction": stored["id"], "api": "chat", "model": "m", "status": "complete"},
            **{"reason": "first", "prompt_tokens": stored["prompt_tokens"], "output_tokens": len(sampled("one"))},
            **{"finish": "stop", "http_status": 200, "request_id": "r-1"},
        }
        assert levels_of(caplog, "turn") == ["INFO"]
        assert not fields_of(caplog, "refused") and not fields_of(caplog, "request")[1:]  # that of the tree
        (prompt,) = fields_of(caplog, "prompt")
        assert (prompt["bridged"], prompt["matched_messages"]) == (False, 0)


async def test_each_choice_has_a_line_with_its_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.post(CHAT, {**HI, "n": 2})
        assert [turn["choice"] for turn in fields_of(caplog, "turn")] == [0, 1]


async def test_retries_say_whether_they_attached_or_were_replayed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again = {"x-stainless-retry-count": "1"}
    async with serving(tmp_path, babble(3, 200, 1, delay_s=0.05)) as server:
        first = asyncio.ensure_future(server.post(CHAT, HI))
        await until(lambda: server.app.state.turns.running.busy)
        await asyncio.gather(first, server.post(CHAT, HI, headers=again))
        await server.post(CHAT, HI, headers=again)
        lines = fields_of(caplog, "turn")
        assert sorted(turn.get("retry", "") for turn in lines) == ["", "attached", "replayed"]
        assert len({turn["interaction"] for turn in lines}) == 1
        assert len({turn["request_id"] for turn in lines}) == 1
        assert [turn.get("retry") for turn in lines if "first_token_s" in turn] == [None]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_fails_is_a_warning_with_its_error(
    tmp_path: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Reply(
        sampled("one two three four"), fault=Fault.ERROR, fault_after=8, delay_s=0.01
    )  # so that a reply begins
    async with serving(tmp_path, lambda _: failing) as server:
        await server.post(CHAT, {**HI, "stream": stream})
        (turn,) = fields_of(caplog, "turn")
        assert (turn["status"], turn["http_status"]) == ("failed", 200 if stream else 502)
        assert turn["error"] and turn["output_tokens"] == 8 and "reason" not in turn
        assert turn["code"] == "engine_failed"  # as tokengrove_errors_total counts it, also for a stream
        assert levels_of(caplog, "turn") == ["WARNING"] and not fields_of(caplog, "refused")


async def test_a_turn_says_how_often_it_went_to_the_engine_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, play([Reply(sampled("one two three"), delay_s=0.03)] * 2)) as server:
        asked = asyncio.create_task(server.post(CHAT, HI))
        await until(lambda: server.app.state.turns.running.busy and bool(server.engine.requests))
        await server.ok("/engine/pause_generation", {"mode": "abort"})
        await server.ok("/engine/continue_generation", {})
        await asked
        await server.post(CHAT, {**HI, "max_tokens": 1})
    assert [turn.get("resubmitted") for turn in fields_of(caplog, "turn")] == [1, None]


async def test_a_turn_that_the_database_refuses_has_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That commits are refused is told by the outage, not again for each turn; its failure is recorded later."""

    async def refused(*_: Any) -> None:
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(TurnLog, "append", refused)
    async with serving(tmp_path, says("one")) as server:
        await server.post(CHAT, HI)
        (turn,) = fields_of(caplog, "turn")
        assert (turn["status"], turn["http_status"], turn["code"]) == ("failed", 503, "store_unavailable")
        assert [record.msg for record in caplog.records if record.levelno >= logging.WARNING] == ["turn"]


async def test_a_client_that_leaves_is_said_at_the_end_of_its_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "GRACE_S", 0.0)
    async with serving(tmp_path, babble(8, 200, 1, delay_s=60.0)) as server:
        import orjson

        parts = [{"type": "http.request", "body": orjson.dumps(HI)}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return parts.pop(0)

        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b""}
        await server.app({**scope, "headers": [(b"content-type", b"application/json")]}, receive, lambda _: None)  # type: ignore[arg-type, return-value]
        await let_pass(0.1, monkeypatch)
        await until(lambda: bool(fields_of(caplog, "turn")))
        (turn,) = fields_of(caplog, "turn")
        assert (turn["status"], turn["http_status"], turn["client_left"]) == ("aborted", 499, True)
        assert levels_of(caplog, "turn") == ["INFO"]


async def test_refusals_have_route_code_message_and_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, says("one")) as server:
        await server.post(CHAT, {"model": "m", "messages": 3}, headers={"x-request-id": "r-1"})
        await server.http.get("/rl/sessions/nobody")
        await server.app.state.store.close()
        await server.post("/rl/start_session", {"task_id": "t"})
        lines = fields_of(caplog, "refused")
        assert lines[0].pop("total_s") >= 0
        assert lines[0] == {
            **{"method": "POST", "route": "/v1/chat/completions", "http_status": 400, "code": "invalid_request"},
            **{"message": "'messages' must be an array, not a number", "session": "s", "request_id": "r-1"},
            **{"client": "127.0.0.1:123"},
        }
        assert [(line["route"], line["code"]) for line in lines[1:]] == [
            ("/rl/sessions/{session}", "session_not_found"),
            ("/rl/start_session", "store_unavailable"),
        ]
        assert levels_of(caplog, "refused") == ["INFO", "INFO", "WARNING"]


async def test_equal_refusals_are_counted_after_the_first_of_a_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says()) as server:
        for _ in range(2):
            for _ in range(request_lines.REFUSALS + 7):
                await server.http.get("/nothing")
            await server.http.get("/rl/sessions/nobody")  # another route
            await let_pass(1.1, monkeypatch)
        assert len(fields_of(caplog, "refused")) == 2 * (request_lines.REFUSALS + 1)
        more = {"route": "unmatched", "code": "not_found", "requests": 7}
        assert fields_of(caplog, "refused more") == [more, more]


async def test_events_of_sessions_are_lines_and_reads_are_for_debugging(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, says("one")) as server:
        await server.chat([user("hi")])
        await server.ok("/s/rl/set_reward", {"reward": 1})
        await server.ok("/rl/end_session", {"reward": 1}, headers={"x-session-id": "s"})
        await server.export()
        for path in ("/health", "/ready", "/metrics", "/rl/sessions"):
            await server.http.get(path)
        lines = [(line["route"], line.get("session")) for line in fields_of(caplog, "request")]
        assert lines[:3] == [
            ("/{session}/rl/set_reward", "s"),
            ("/rl/end_session", "s"),
            ("/trajectories/export", "s"),
        ]
        assert levels_of(caplog, "request") == ["INFO"] * 3 + ["DEBUG"] * 4


async def test_a_turn_that_another_worker_answers_has_one_line(
    tmp_path: Path, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers_of(tmp_path, postgres_url, migrate=True) as workers:
        await workers[1].http.post("/engine/nothing", json={})
        await workers[1].http.post("/mailbox/next", json={"wait_s": "x"})
        assert len(fields_of(caplog, "refused")) == 2
        assert lines_of(caplog, logger="proxy.api.request_lines")
