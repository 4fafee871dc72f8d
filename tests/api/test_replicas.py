"""Several servers on one Postgres act as one: the tree is the same whichever server a request reaches."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.acting import act
from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from proxy.store.sql import reads
from proxy.types import SessionRecord
from tests.exports import entries
from tests.support import Server, sampled, says, serving, tiny_renderer, user
from tokengrove.options.session import Credit

CHAT = "/s/v1/chat/completions"
ADMIN = {"authorization": "Bearer admin"}


@contextlib.asynccontextmanager
async def replicas(folder: Path, url: str, *scripts: Script, **settings: Any) -> AsyncIterator[list[Server]]:
    """Start one server per script."""
    async with contextlib.AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving(folder, script, database_url=url, **settings)) for script in scripts
        ]
        yield servers


def agent(**options: Any) -> Script:
    return act(tiny_renderer(), chunk=8, **options)


def gated(text: str, gate: asyncio.Event) -> Any:
    """A `generate` that waits for `gate` before its last chunk."""

    def install(server: Server) -> None:
        plain = server.engine.generate

        async def generate(request: GenerateRequest) -> AsyncIterator[Any]:
            async for chunk in plain(request):
                if chunk.finish is not None:
                    await gate.wait()
                yield chunk

        server.engine.generate = generate  # type: ignore[method-assign]
        server.engine.script = play([Reply(sampled(text))])

    return install


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(1000):
        if await holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


def shape(tree: list[Any]) -> list[Any]:
    order = {node["id"]: node["seq"] for node in tree}
    keys = ("seq", "aligned", "reason", "status", "prompt_tokens", "output_tokens")
    return [(order.get(node["parent_id"]), *(node[key] for key in keys)) for node in tree]


async def converse(servers: list[Server]) -> list[Any]:
    """Run a conversation with a sub-agent, a branch and a resampled turn; each request goes to the next server."""
    turn = 0

    async def answer(messages: list[Any]) -> Any:
        nonlocal turn
        turn += 1
        return await servers[turn % len(servers)].answer(messages)

    main, sub = [user("plan a trip")], [user("find a hotel")]
    for step in range(3):
        main += [await answer(main), user(f"go on {step}")]
        sub += [await answer(sub), user(f"another {step}")]
    await answer(main)
    await answer([*main[:-1], user("or rather this")])
    await answer(main)
    return shape(await servers[0].tree())


async def test_a_round_robin_over_replicas_gives_the_tree_of_one_server(tmp_path: Path, postgres_url: str) -> None:
    url = f"sqlite:///{tmp_path / 'alone.db'}"
    async with serving(tmp_path, agent(), database_url=url) as alone:
        wanted = await converse([alone])
        samples = [sample["input_ids"] for sample in await alone.export()]
    async with replicas(tmp_path, postgres_url, agent(), agent(), agent()) as servers:
        assert await converse(servers) == wanted
        for server in servers:
            assert shape(await server.tree()) == wanted
            assert [sample["input_ids"] for sample in await server.export()] == samples


@pytest.mark.parametrize("known", [False, True])
async def test_one_prompt_on_two_replicas_at_once_gives_a_first_turn_and_a_sibling(
    tmp_path: Path, postgres_url: str, known: bool
) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as servers:
        messages = [user("hi")]
        if known:
            messages += [await servers[0].answer(messages), user("more")]
        for _ in range(5):
            await asyncio.gather(*(server.answer(messages) for server in servers))
        tree = await servers[0].tree()
        counts = Counter(node["reason"] for node in tree)
        assert counts == ({"first": 1, "continued": 1, "resampled": 9} if known else {"first": 1, "resampled": 9})
        assert [node["seq"] for node in tree] == list(range(len(tree)))
        assert shape(await servers[1].tree()) == shape(tree)


async def test_different_messages_on_two_replicas_at_once_are_branches(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as servers:
        messages = [user("hi"), await servers[0].answer([user("hi")])]
        await asyncio.gather(*(servers[n % 2].answer([*messages, user(f"way {n}")]) for n in range(8)))
        tree = await servers[1].tree()
        assert Counter(node["reason"] for node in tree) == {"first": 1, "continued": 1, "branched": 7}
        assert {node["parent_id"] for node in tree[1:]} == {tree[0]["id"]}


async def test_choices_on_two_replicas_at_once_are_siblings(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as servers:
        await asyncio.gather(*(server.chat([user("hi")], n=4) for server in servers))
        reasons = [node["reason"] for node in await servers[0].tree()]
        assert Counter(reasons) == {"first": 1, "resampled": 7}


async def test_a_session_created_by_its_path_is_one_session_on_all_replicas(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as servers:
        for name in ("a", "b", "c", "d"):
            await asyncio.gather(*(servers[n % 2].answer([user(f"task {n}")], name) for n in range(4)))
            trees = [await server.tree(name) for server in servers]
            assert shape(trees[0]) == shape(trees[1])
            assert Counter(node["reason"] for node in trees[0]) == {"first": 1, "new_root": 3}


async def test_a_response_is_continued_by_id_on_another_replica(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as (one, two):
        await two.answer([user("something before")])  # now this replica has the session in memory
        first = await one.ok("/s/v1/responses", {"model": "m", "input": "hi"})
        again = {"model": "m", "input": "more", "previous_response_id": first["id"]}
        await two.ok("/s/v1/responses", again)
        tree = await one.tree()
        assert (tree[2]["reason"], tree[2]["parent_id"], tree[2]["aligned"]) == ("continued", tree[1]["id"], True)


async def test_limits_count_the_turns_of_all_replicas(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as (one, two):
        await one.ok("/rl/start_session", {"session_id": "s", "limits": {"max_turns": 2}})
        await one.answer([user("a")])
        await two.answer([user("b")])
        for server in (one, two):
            response = await server.post(CHAT, {"model": "m", "messages": [user("c")]})
            assert response.json()["error"]["code"] == "session_limit_reached"


async def test_rewards_and_the_end_on_different_replicas_give_the_right_returns(
    tmp_path: Path, postgres_url: str
) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent(), agent()) as (one, two, three):
        await one.ok("/rl/start_session", {"session_id": "s", "discount": 0.5})
        messages = [user("a")]
        messages += [await one.answer(messages), user("b")]
        await two.answer(messages)
        await three.tree()  # now this replica has the session in memory, without rewards
        await one.ok("/s/rl/set_reward", {"reward": 4.0})
        assert (await three.ok("/s/rl/end_session", {}))["interaction_count"] == 2
        assert [node["return"] for node in await two.tree()] == [2.0, 4.0]
        await two.ok("/s/rl/set_reward", {"step_scores": [1.0, 8.0]})
        assert [node["return"] for node in await three.tree()] == [5.0, 8.0]
        store = one.app.state.store
        tree = await one.tree()
        assert await store.database.read(reads.load_returns, "s") == {
            (tree[0]["id"], 0.5, Credit.TREE): 5.0,
            (tree[1]["id"], 0.5, Credit.TREE): 8.0,
        }


async def test_concurrent_named_rewards_on_all_replicas_are_all_kept(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as servers:
        await servers[0].answer([user("a")])
        bodies = [{"reward": float(n), "name": f"r{n}"} for n in range(16)]
        await asyncio.gather(*(servers[n % 2].ok("/s/rl/set_reward", body) for n, body in enumerate(bodies)))
        wanted = {f"r{n}": float(n) for n in range(16)}
        for server in servers:
            assert [node["rewards"] for node in await server.tree()] == [wanted]


async def test_all_replicas_export_a_mark_set_on_one(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, says("one"), says("two"), says()) as (first, second, third):
        reply = await first.answer([user("a")])
        turn = {"model": "m", "messages": [user("a"), reply, user("b")]}
        last = (await second.ok(CHAT, turn))["id"]
        name = (await third.tree())[0]["id"]
        await asyncio.gather(
            first.ok("/s/rl/mark", {"interaction_id": name, "trainable": False}),
            second.ok("/s/rl/mark", {"interaction_id": last, "trainable": True, "spans": [[0, 1]]}),
            third.ok("/s/rl/set_reward", {"reward": 1}),
        )
        for server in (first, second, third):
            marks = [(node["trainable"], node["spans"], node["reward"]) for node in await server.tree()]
            assert marks == [(False, [], None), (True, [[0, 1]], 1.0)]
            (sample,) = await server.export()
            assert sum(sample["loss_mask"]) == 1


async def test_a_reward_and_the_end_at_once_on_two_replicas_leave_the_right_returns(
    tmp_path: Path, postgres_url: str
) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as (one, two):
        for n in range(12):
            name = f"s{n}"
            node = (await one.chat([user("a")], name))["id"]
            await two.tree(name)
            rewarded = one.ok(f"/{name}/rl/set_reward", {"reward": 4.0})
            ended = two.ok(f"/{name}/rl/end_session", {})
            await asyncio.gather(*((rewarded, ended) if n % 2 else (ended, rewarded)))
            assert await one.app.state.store.database.read(reads.load_returns, name) == {(node, 1.0, Credit.TREE): 4.0}


async def test_the_first_of_two_ends_counts(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as servers:
        await servers[0].answer([user("a")])
        await servers[1].tree()
        outcomes = ("Finished", "Failed")
        answers = await asyncio.gather(
            *(
                server.post("/s/rl/end_session", {"outcome": outcome})
                for server, outcome in zip(servers, outcomes, strict=True)
            )
        )
        assert sorted(answer.status_code for answer in answers) == [200, 409]
        first = (await servers[0].http.get("/rl/sessions/s")).json()
        assert (await servers[0].post("/s/rl/end_session", {"outcome": "Timeout"})).status_code == 409
        second = (await servers[1].http.get("/rl/sessions/s")).json()
        assert first["outcome"] == second["outcome"] in outcomes
        assert first["ended_at"] == second["ended_at"]


async def test_a_session_that_ended_on_another_replica_refuses_turns(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as (one, two):
        await one.answer([user("a")])
        await two.answer([user("b")])
        await one.ok("/s/rl/end_session", {})
        response = await two.post(CHAT, {"model": "m", "messages": [user("c")]})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "session_closed")


async def test_a_turn_that_completes_after_the_end_on_another_replica_gets_its_return(
    tmp_path: Path, postgres_url: str
) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as (one, two):
        await two.answer([user("a")])
        gate = asyncio.Event()
        gated("late", gate)(one)
        late = asyncio.create_task(one.answer([user("b")]))
        await until(lambda: _is(bool(one.engine.running)))
        await two.ok("/s/rl/end_session", {"reward": 1.0})
        gate.set()
        await late

        async def all_have_returns() -> bool:
            return len(await one.app.state.store.database.read(reads.load_returns, "s")) == 2

        await until(all_have_returns)
        assert [node["return"] for node in await two.tree()] == [1.0, 0.0]


async def _is(value: bool) -> bool:
    return value


async def test_a_waiting_export_notices_the_end_on_another_replica(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as (one, two):
        await one.answer([user("a")])
        wanted = {"session_id": "s", "wait_s": 600}
        export = asyncio.create_task(two.ok("/export_trajectories", wanted))

        async def waiting() -> bool:
            session = two.app.state.registry.find("s")
            return session is not None and session.waiting > 0

        await until(waiting)
        await one.ok("/s/rl/end_session", {"outcome": "Finished"})
        assert entries(await export)["s"]["outcome"] == "Finished"


async def test_an_unmarked_repetition_on_another_replica_is_a_new_sample(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, says("one", "three"), says("two", "four")) as servers:
        said = [(await servers[n % 2].answer([user("hi")]))["content"] for n in range(4)]
        assert said == ["one", "two", "three", "four"]


@pytest.mark.parametrize("mark", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}])
async def test_a_marked_retry_gets_the_reply_that_another_replica_committed(
    tmp_path: Path, postgres_url: str, mark: dict[str, str]
) -> None:
    async with replicas(tmp_path, postgres_url, says("one"), says()) as (one, two):
        await two.http.get("/rl/sessions/s")
        body = {"model": "m", "messages": [user("hi")]}
        first = await one.ok(CHAT, body, headers={"idempotency-key": "k"} if "idempotency-key" in mark else {})
        again = await two.ok(CHAT, body, headers=mark)
        assert (again["id"], again["choices"]) == (first["id"], first["choices"])
        assert len(await two.tree()) == 1


async def test_a_reply_that_another_replica_did_not_finish_is_replayed(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, says("one"), says()) as (one, two):
        gate = asyncio.Event()
        gated("one", gate)(one)
        leaving = asyncio.create_task(one.answer([user("hi")]))
        await until(lambda: _is(bool(one.engine.running)))
        leaving.cancel()  # over ASGI, cancelling is a disconnect
        gate.set()

        async def committed() -> bool:
            response = await two.http.get("/rl/sessions/s")
            return response.status_code == 200 and any(
                node["status"] == "complete" for node in response.json()["interactions"]
            )

        await until(committed)
        assert (await two.answer([user("hi")]))["content"] == "one"
        assert len(await two.tree()) == 1


async def test_a_failure_on_one_replica_is_superseded_on_another(tmp_path: Path, postgres_url: str) -> None:
    failing = play([Reply(sampled("one"), fault=Fault.ERROR, fault_after=1)])
    async with replicas(tmp_path, postgres_url, failing, says("two")) as (one, two):
        body = {"model": "m", "messages": [user("hi")]}
        assert (await one.post(CHAT, body)).status_code == 502
        assert (await two.answer([user("hi")]))["content"] == "two"

        async def superseded() -> bool:
            return [node["status"] for node in await one.tree()] == ["superseded", "complete"]

        await until(superseded)
        # On the first replica, a retry now finds only the reply of the second one.
        retried = await one.ok(CHAT, body, headers={"x-stainless-retry-count": "1"})
        assert retried["choices"][0]["message"]["content"] == "two"


async def test_keys_issued_on_one_replica_work_on_all(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent(), admin_key="admin") as (one, two):
        body = {"model": "m", "messages": [user("hi")]}
        start = {"session_id": "a", "api_key": "key-of-slot-seventeen"}
        bearer = {"authorization": "Bearer key-of-slot-seventeen"}
        for server in (one, two):
            assert (await server.post("/v1/chat/completions", body, headers=bearer)).status_code == 401
        started = await one.ok("/rl/start_session", start, headers=ADMIN)
        for server in (one, two):
            await server.ok("/v1/chat/completions", body, headers=bearer)
        await two.ok("/" + started["root_url"].split("/", 3)[3] + "/v1/chat/completions", body)
        control = {"authorization": f"Bearer {started['control_key']}"}
        await two.ok("/rl/end_session", {"reward": 1.0}, headers=control)
        # The key moves to a session of another replica, and this replica sees it at once.
        await two.ok("/rl/start_session", {**start, "session_id": "b"}, headers=ADMIN)
        await one.ok("/v1/chat/completions", body, headers=bearer)
        shown = await one.http.get("/rl/sessions/b", headers=ADMIN)
        assert len(shown.json()["interactions"]) == 1


async def test_of_two_concurrent_starts_with_one_key_on_two_replicas_one_succeeds(
    tmp_path: Path, postgres_url: str
) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent(), admin_key="admin") as servers:
        starts = [{"session_id": f"s{n}", "api_key": "key-of-slot-seventeen"} for n in range(6)]
        answers = await asyncio.gather(
            *(servers[n % 2].post("/rl/start_session", body, headers=ADMIN) for n, body in enumerate(starts))
        )
        codes = Counter(answer.json().get("error", {}).get("code", "started") for answer in answers)
        assert codes == {"started": 1, "key_in_use": 5}


async def test_replicas_number_the_sessions_of_a_task_without_conflict(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as servers:
        starts = [servers[n % 2].ok("/rl/start_session", {"task_id": "t"}) for n in range(24)]
        names = [started["session_id"] for started in await asyncio.gather(*starts)]
        assert len(set(names)) == 24


async def test_a_replica_with_an_old_session_number_catches_up_at_once(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as (one, two):
        await two.ok("/rl/start_session", {"task_id": "t"})
        for _ in range(30):
            await one.ok("/rl/start_session", {"task_id": "t"})
        tried: list[Any] = []
        create = two.app.state.store.starts.create_session

        def counted(record: SessionRecord, **conditions: Any) -> Any:
            tried.append(record.session_id)
            return create(record, **conditions)

        monkeypatch.setattr(two.app.state.store.starts, "create_session", counted)
        started = await two.ok("/rl/start_session", {"task_id": "t"})
        assert started["session_id"] == "t-31" == tried[-1]
        assert len(tried) < 5


async def test_replicas_that_change_the_same_sessions_never_deadlock(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, agent(), agent()) as servers:
        names = [f"s{n}" for n in range(6)]

        async def live(server: Server, name: str) -> None:
            for _ in range(3):
                await server.answer([user("hi")], name)
                await server.ok(f"/{name}/rl/set_reward", {"reward": 1.0})

        orders = (names, names[::-1])
        await asyncio.gather(
            *(live(server, name) for server, order in zip(servers, orders, strict=True) for name in order)
        )
        for name in names:
            tree = await servers[0].tree(name)
            assert len(tree) == 6
            assert Counter(node["reason"] for node in tree) == {"first": 1, "resampled": 5}


async def test_a_single_server_on_sqlite_reads_nothing_for_a_turn(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'alone.db'}"
    async with serving(tmp_path, says("one", "two", "three"), database_url=url) as server:
        first = await server.answer([user("hi")])
        await until(lambda: _is(server.app.state.store.news.excludes("another")))  # the ids of stored sessions are read
        reads: list[Any] = []
        event.listen(server.app.state.store.database._reader_engine, "checkout", lambda *seen: reads.append(seen))
        await server.answer([user("hi"), first, user("more")])
        await server.answer([user("hi")])
        assert reads == []
