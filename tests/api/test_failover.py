"""The database fails in the middle of a turn: a retry stores it exactly once, and the server goes on by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from proxy.turns import commits
from tests.api.test_replicas import replicas
from tests.databases import execute, stalled_commits
from tests.postgres_link import Link, linked
from tests.support import Server, says, serving, until, user
from tests.wide import WIDE

CHAT = "/s/v1/chat/completions"
QUESTION = "a-question-that-marks-its-turn"
AT_ONCE: dict[str, Any] = {"database_wait_s": 0.0}
"""Settings with which no request waits for the database."""
BODY = {"model": "m", "messages": [user(QUESTION)]}


@pytest.fixture
def link(postgres_url: str) -> Iterator[Link]:
    """A link to a new database at the newest revision."""
    with linked(postgres_url) as link:
        yield link


async def retried(server: Server, key: str | None, path: str = CHAT, body: Any = BODY) -> Any:
    """Send a request again as the SDKs do, until it is answered."""
    for attempt in range(1, 200):
        headers = {"x-stainless-retry-count": str(attempt)} | ({"idempotency-key": key} if key else {})
        response = await server.post(path, body, headers=headers)
        if response.status_code == 200:
            return response.json()
        assert (response.status_code, response.headers["x-should-retry"]) == (503, "true"), response.text
        await asyncio.sleep(0.02)
    raise AssertionError(response.text)


KEY = "the-key-of-the-request"


@pytest.mark.parametrize(
    ("known", "after", "key"),
    [
        (False, False, None),
        (True, True, None),
        (False, True, KEY),
        (True, False, KEY),
        *(pytest.param(*more, marks=WIDE) for more in ((False, True, None), (True, False, None))),
        *(pytest.param(*more, marks=WIDE) for more in ((False, False, KEY), (True, True, KEY))),
    ],
)
async def test_a_commit_whose_answer_is_lost_is_found_by_the_retry(
    tmp_path: Path, link: Link, after: bool, key: str | None, known: bool
) -> None:
    """`known`: the session is stored before, so that it stays in memory whatever becomes of the turn."""
    async with replicas(tmp_path, link.url, says("zero", "one", "two"), says("other"), **AT_ONCE) as (one, two):
        if known:
            await one.chat([user("hi")])
        for stream, elsewhere in ((False, False), (True, False), (False, True), (True, True)):
            body = {**BODY, "messages": [user(f"{QUESTION}-{stream}-{elsewhere}")]}
            one.engine.script = two.engine.script = says("first", "again")
            link.after, link.cut_at = after, QUESTION.encode()
            link.cut.clear()
            headers = {"idempotency-key": f"{key}-{stream}-{elsewhere}"} if key else {}
            failed = await one.post(CHAT, {**body, "stream": stream}, headers=headers)
            assert link.cut.is_set()
            assert failed.status_code == (200 if stream else 503)
            assert "store_unavailable" in failed.text and "[DONE]" not in failed.text
            reply = await retried(two if elsewhere else one, headers.get("idempotency-key"), body=body)
            assert reply["choices"][0]["message"]["content"] == ("first" if after else "again")
        for server in (one, two):
            tree = await server.tree()
            assert [turn["status"] for turn in tree].count("complete") == 4 + known
            assert {turn["status"] for turn in tree} <= {"complete", "superseded"}
            assert not {turn["reason"] for turn in tree} & {"resampled"}
        (entry,) = (await one.ok("/trajectories/export", {"session_id": "s"}))["sessions"]
        assert (entry["complete"], entry["begun_not_ended"]) == (True, 0)


def held(server: Server) -> asyncio.Event:
    """Let the engine of a server answer only once this event is set."""
    gate, plain = asyncio.Event(), server.engine.generate

    async def generate(request: Any) -> AsyncIterator[Any]:
        await gate.wait()
        async for chunk in plain(request):
            yield chunk

    server.engine.generate = generate  # type: ignore[method-assign]
    return gate


async def ready(server: Server) -> int:
    return (await server.http.get("/ready")).status_code


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_of_two_servers_outlive_a_database_that_is_down_when_they_end(
    tmp_path: Path, link: Link, stream: bool
) -> None:
    async with replicas(tmp_path, link.url, says("zero", "one", "again"), says("other", "again"), **AT_ONCE) as servers:
        one, two = servers
        await one.chat([user("hi")])
        gates = [held(server) for server in servers]
        bodies = [{**BODY, "messages": [user(f"{QUESTION} {n}")]} for n in range(2)]
        turns = [
            asyncio.ensure_future(server.post(CHAT, {**body, "stream": stream}))
            for server, body in zip(servers, bodies, strict=True)
        ]
        await until(lambda: len(execute(link.behind, "SELECT * FROM intents")) == 2)
        link.set_down(True)
        for gate in gates:
            gate.set()
        for failed in await asyncio.gather(*turns):
            assert failed.status_code == (200 if stream else 503)
            assert "store_unavailable" in failed.text and "[DONE]" not in failed.text
        for path, body in (
            (CHAT, bodies[0]),
            ("/s/rl/set_reward", {"reward": 1.0}),
            ("/rl/start_session", {"task_id": "t"}),
        ):
            refused = await one.post(path, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert [await ready(server) for server in servers] == [503, 503]
        link.set_down(False)
        replies = [await retried(server, None, body=body) for server, body in zip(servers, bodies, strict=True)]
        assert [await ready(server) for server in servers] == [200, 200]
        for server in servers:
            complete = [turn["id"] for turn in await server.tree() if turn["status"] == "complete"]
            assert complete[1:] == [reply["id"] for reply in replies]
        await until(lambda: execute(link.behind, "SELECT * FROM intents") == [])
        (entry,) = (await two.ok("/trajectories/export", {"session_id": "s"}))["sessions"]
        assert (entry["complete"], entry["begun_not_ended"], entry["failed"]) == (True, 0, 0)


async def test_a_database_that_takes_no_writes_is_left_for_the_primary(tmp_path: Path, link: Link) -> None:
    """As after a failover: the connections that are kept stay read-only, new ones are not."""
    async with replicas(tmp_path, link.url, says("zero", "one", "two"), says("three"), **AT_ONCE) as (one, two):
        await one.chat([user("hi")])
        name = make_url(link.behind).database
        gate = held(one)
        turn = asyncio.ensure_future(one.post(CHAT, BODY))
        await until(lambda: len(execute(link.behind, "SELECT * FROM intents")) == 1)
        execute(link.behind, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        link.set_down(True)
        link.set_down(False)
        gate.set()
        failed = await turn
        assert (failed.status_code, failed.json()["error"]["message"]) == (
            503,
            "the database refused the commit: it is read-only",
        )
        for server in (one, two):
            refused = await server.post("/s/rl/set_reward", {"reward": 1.0})
            assert (refused.status_code, await ready(server)) == (503, 503)
        execute(link.behind, f"ALTER DATABASE {name} RESET default_transaction_read_only", writable=True)
        await retried(one, None)
        for server in (one, two):
            assert await ready(server) == 200
            await server.ok("/s/rl/set_reward", {"reward": 1.0, "turn": 1})
        tree = await two.tree()
        assert [(turn["status"], turn["reward"]) for turn in tree if turn["status"] == "complete"] == [
            ("complete", None),
            ("complete", 1.0),
        ]


async def test_connections_that_the_database_ends_cost_no_turn(tmp_path: Path, link: Link) -> None:
    async with replicas(tmp_path, link.url, says("zero", "one"), says("two"), **AT_ONCE) as (one, two):
        await one.chat([user("hi")])
        gate = held(one)
        turn = asyncio.ensure_future(one.post(CHAT, BODY))
        await until(lambda: len(execute(link.behind, "SELECT * FROM intents")) == 1)
        execute(
            link.behind,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        gate.set()
        assert (await turn).status_code == 200
        assert len(await two.tree()) == 2


@pytest.mark.parametrize("path", ["/s/v1/chat/completions", "/s/v1/responses", "/s/v1/messages"])
async def test_a_stream_whose_commit_is_refused_ends_with_the_error_event_of_its_api(
    tmp_path: Path, link: Link, path: str
) -> None:
    async with serving(tmp_path, says("zero", "one"), database_url=link.url, **AT_ONCE) as server:
        body = {"model": "m", "max_tokens": 50, "stream": True}
        body |= {"input": "hi"} if path.endswith("responses") else {"messages": [user("hi")]}
        gate = held(server)
        turn = asyncio.ensure_future(server.post(path, body))
        await until(lambda: len(execute(link.behind, "SELECT * FROM intents")) == 1)
        link.set_down(True)
        gate.set()
        text = (await turn).text
        events = {"completions": "data: ", "responses": "event: response.failed\n", "messages": "event: error\n"}
        (failed,) = [block for block in text.split("\n\n") if "the connection to it is lost" in block]
        assert failed.startswith(events[path.rpartition("/")[2]])
        for end in ("response.completed", "message_stop", '"finish_reason":"stop"'):
            assert end not in text
        assert link.url.partition("host=")[2] not in text


@pytest.mark.parametrize("after", [False, True])
async def test_an_end_that_is_sent_again_rewards_one_turn_once(tmp_path: Path, link: Link, after: bool) -> None:
    """Also if a turn is committed between the end that failed and the one that is sent again."""
    async with replicas(tmp_path, link.url, says("one", "two"), says(), **AT_ONCE) as (one, two):
        first = await one.answer([user("hi")])
        link.after, link.cut_at = after, b"the-reason-of-the-end"
        end = {"reward": 1.0, "outcome": "Finished", "exit_reason": "the-reason-of-the-end"}
        refused = await one.post("/s/rl/end_session", end)
        assert (refused.status_code, link.cut.is_set()) == (503, True)
        go_on = await one.post(CHAT, {"messages": [user("hi"), first, user("more")]})
        assert go_on.status_code == (403 if after else 200)
        for server in (one, two):
            counted = await server.ok("/s/rl/end_session", end)
            assert counted == {"interaction_count": 1 if after else 2}
            tree = await server.tree()
            assert [turn["reward"] for turn in tree] == ([1.0] if after else [None, 1.0])
            assert [turn["return"] for turn in tree] == ([1.0] if after else [1.0, 1.0])
        (entry,) = (await two.ok("/trajectories/export", {"session_id": "s"}))["sessions"]
        assert (entry["score"], entry["outcome"]) == (1.0, "Finished")


@pytest.mark.parametrize(
    ("state", "times", "told"),
    [
        ("53100", 2, "its disk is full"),
        ("57P03", 2, None),
        ("40001", 3, ""),
        ("40P01", 3, ""),
    ],
)
async def test_a_commit_that_fails_with_an_error_of_postgres_is_done_once(
    tmp_path: Path, link: Link, state: str, times: int, told: str | None
) -> None:
    """`told`: what the client is told; nothing if the server tries again by itself."""
    async with replicas(tmp_path, link.url, says("zero", "one", "again"), says(), **AT_ONCE) as (one, two):
        await one.chat([user("hi")])
        execute(link.behind, "CREATE SEQUENCE tries")
        execute(
            link.behind,
            f"CREATE FUNCTION refuse() RETURNS trigger AS $$ BEGIN IF nextval('tries') <= {times} THEN "
            f"RAISE EXCEPTION 'refused' USING ERRCODE = '{state}'; END IF; RETURN NEW; END $$ LANGUAGE plpgsql",
        )
        execute(
            link.behind,
            "CREATE TRIGGER refuse BEFORE INSERT ON interactions FOR EACH ROW EXECUTE FUNCTION refuse()",
        )
        response = await one.post(CHAT, BODY)
        if told != "":
            assert (response.status_code, response.json()["error"]["code"]) == (503, "store_unavailable")
            assert (told or "") in response.text and "refused'" not in response.text
            assert await ready(one) == 200  # the probe writes elsewhere, and finds the fault to be over
            await retried(one, None)
        complete = [turn for turn in await two.tree() if turn["status"] == "complete"]
        assert len(complete) == 2
        (entry,) = (await two.ok("/trajectories/export", {"session_id": "s"}))["sessions"]
        assert (entry["complete"], entry["begun_not_ended"]) == (True, 0)


@pytest.mark.parametrize("known", [False, True])
async def test_a_retry_waits_for_a_commit_that_the_database_is_still_at(
    tmp_path: Path, link: Link, known: bool
) -> None:
    """The connection of the commit is lost, and its transaction goes on for a while."""
    async with replicas(tmp_path, link.url, says("zero", "one") if known else says("one"), says("two"), **AT_ONCE) as (
        one,
        two,
    ):
        if known:
            await one.chat([user("hi")])
        with stalled_commits(link.behind):
            turn = asyncio.ensure_future(one.post(CHAT, BODY))
            stalled = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory'"
            await until(lambda: execute(link.behind, stalled) != [])
            link.set_down(True)
            assert (await turn).status_code == 503
            link.set_down(False)
            again = asyncio.ensure_future(retried(two, None))
            waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event <> 'advisory'"
            await until(lambda: again.done() or execute(link.behind, waiting) != [])
        assert (await again)["choices"][0]["message"]["content"] == "one"
        assert [turn["status"] for turn in await two.tree()] == ["complete"] * (1 + known)


@pytest.mark.parametrize("again", [False, True])
async def test_a_failure_that_could_not_be_recorded_is_recorded_later_unless_another_server_answered(
    tmp_path: Path, link: Link, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "_RETRIED_WITHIN_S", 0.0)
    async with replicas(tmp_path, link.url, says("zero", "one", "more"), says("again"), **AT_ONCE) as (one, two):
        await one.chat([user("hi")])
        gate = held(one)
        turn = asyncio.ensure_future(one.post(CHAT, BODY))
        begun = "SELECT * FROM intents"
        await until(lambda: len(execute(link.behind, begun)) == 1)
        link.set_down(True)
        gate.set()
        assert (await turn).status_code == 503
        link.set_down(False)
        if again:
            await retried(two, None)
        assert len(execute(link.behind, begun)) == 1
        await one.chat([user("more")], "another")
        await until(lambda: execute(link.behind, begun) == [])
        (entry,) = (await two.ok("/trajectories/export", {"session_id": "s"}))["sessions"]
        assert (entry["complete"], entry["begun_not_ended"], entry["failed"]) == (again, 0, 0 if again else 1)
