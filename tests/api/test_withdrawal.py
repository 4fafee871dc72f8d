"""`POST /rl/withdraw_session` and `delivery`: what counts for a group, a claim and an export, and what only stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.commands.audit import audit
from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.inspection import inspecting
from proxy.store.pruning import prune
from tests.api.test_claims import acknowledge, claim, finish, served, two_servers
from tests.api.test_deletion import ADMIN, bearer
from tests.api.test_group_claims import end, held, start
from tests.conftest import Postgres
from tests.databases import execute
from tests.exports import entries
from tests.mailboxes import posting
from tests.support import Server, sampled, says, serving, until, user
from tests.wide import CROSSED

HANGS = Reply(sampled("never said"), fault=Fault.HANG, fault_after=1)


LEFT_OUT = "x-tokengrove-left-out"


async def withdraw(server: Server, name: str, **body: Any) -> Any:
    return await server.ok(f"/{name}/rl/withdraw_session", body)


async def shown(server: Server, name: str) -> Any:
    return (await server.http.get(f"/rl/sessions/{name}")).json()


async def export(server: Server, **body: Any) -> Any:
    return await server.ok("/trajectories/export", {"layout": "concat", **body})


async def test_a_live_session_that_is_withdrawn_ends_as_the_call_says(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "s", group_id="g")
        told = {"outcome": "Failed", "exit_reason": "played again", "metrics": {"steps": 3}, "finished": False}
        assert await withdraw(server, "s", **told) == {"interaction_count": 1}
        found = await shown(server, "s")
        assert (found["status"], found["withdrawn"]) == ("ended", True)
        assert {name: found[name] for name in told} == told
        assert found["ended_at"] is not None
        assert [turn["status"] for turn in found["interactions"]] == ["complete"]
        refused = await server.post("/s/v1/chat/completions", {"messages": [user("more")]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "session_closed")
        assert "session 's' has been withdrawn" in refused.text


async def test_a_withdrawal_that_is_repeated_changes_nothing(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "s")
        await withdraw(server, "s", outcome="Failed", exit_reason="first")
        before = execute(database_url, "SELECT * FROM sessions")
        assert await withdraw(server, "s", outcome="Timeout", exit_reason="second") == {"interaction_count": 1}
        assert await withdraw(server, "s") == {"interaction_count": 1}
        assert execute(database_url, "SELECT * FROM sessions") == before


async def test_a_session_that_has_ended_keeps_what_its_end_said(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "s")
        await server.ok("/s/rl/end_session", {"reward": 1.0, "outcome": "Finished", "exit_reason": "done"})
        await withdraw(server, "s", outcome="Failed", exit_reason="played again")
        found = await shown(server, "s")
        assert (found["outcome"], found["exit_reason"], found["withdrawn"]) == ("Finished", "done", True)
        assert [turn["reward"] for turn in found["interactions"]] == [1.0]
        again = await server.post("/s/rl/end_session", {"outcome": "Finished"})
        assert again.status_code == 200
        await server.ok("/s/rl/set_reward", {"reward": 2.0})
        assert (await shown(server, "s"))["withdrawn"] is True


async def test_its_id_stays_taken_and_its_keys_stay_its_own(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "s")
        await withdraw(server, "s")
        refused = await server.post("/rl/start_session", {"session_id": "s"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")
        unknown = await server.post("/nobody/rl/withdraw_session", {})
        assert unknown.status_code == 404


@CROSSED
@pytest.mark.parametrize("stream", [False, True])
async def test_turns_that_run_are_cancelled_and_stay_as_aborted(
    tmp_path: Path, database_url: str, stream: bool
) -> None:
    async with serving(tmp_path, play([HANGS]), database_url=database_url) as server:
        turn = asyncio.ensure_future(
            server.post("/s/v1/chat/completions", {"messages": [user("hi")], "stream": stream})
        )
        await until(lambda: bool(server.engine.requests))
        assert await withdraw(server, "s") == {"interaction_count": 0}
        response = await turn
        assert response.status_code == (200 if stream else 403)
        assert "session 's' has been withdrawn" in response.text
        [left] = (await shown(server, "s"))["interactions"]
        assert (left["status"], left["error"]) == ("aborted", "cancelled: the session was withdrawn")


async def test_a_request_of_a_withdrawn_session_leaves_the_mailbox(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        asked = asyncio.ensure_future(server.post("/s/v1/chat/completions", {"messages": [user("hi")]}))
        await server.letter()
        await withdraw(server, "s")
        assert (await asked).status_code == 403
        assert (await server.poll())["status"] == "empty"
        assert (await server.ok("/mailbox/next", {"session_id": "s"}))["status"] == "ended"


async def test_it_needs_the_keys_that_an_end_needs(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one"), admin_key="the-admin-key") as server:
        keys = await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)
        other = await server.ok("/rl/start_session", {"session_id": "other"}, headers=ADMIN)
        for key in ("", keys["api_key"], other["control_key"]):
            assert (await server.post("/s/rl/withdraw_session", {}, headers=bearer(key))).status_code in (401, 403)
        await server.ok("/rl/withdraw_session", {}, headers=bearer(keys["control_key"]))
        await server.ok("/other/rl/withdraw_session", {}, headers=ADMIN)


@pytest.mark.parametrize("body", [{"reward": 1.0}, {"score": 1.0}, {"outcome": "Again"}, {"metrics": 3}])
async def test_a_field_that_it_does_not_take_is_refused_by_name(tmp_path: Path, body: dict[str, Any]) -> None:
    async with serving(tmp_path, says("one")) as server:
        await server.chat([user("hi")])
        refused = await server.post("/s/rl/withdraw_session", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(body)))
        assert (await shown(server, "s"))["withdrawn"] is False


async def test_a_call_with_a_key_is_done_once_and_answered_the_same(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "s")
        headers = {"idempotency-key": "once"}
        first = await server.ok("/s/rl/withdraw_session", {}, headers=headers)
        assert await server.ok("/s/rl/withdraw_session", {}, headers=headers) == first == {"interaction_count": 1}
        assert execute(database_url, "SELECT count(*) FROM answers") == [(1,)]
        other = await server.post("/s/rl/withdraw_session", {"outcome": "Failed"}, headers=headers)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")


async def test_no_claim_gets_a_withdrawn_session(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "live")
        await withdraw(server, "live", outcome="Finished")
        await finish(server, "ended", "kept")
        await withdraw(server, "ended")
        assert await held(server, limit=8) == ["kept"]


async def test_a_claim_that_held_it_names_it_as_lost(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b")
        await claim(server, limit=2, claim_id="trainer")
        await withdraw(server, "a")
        assert await held(server, claim_id="trainer", renew=True) == ["b"]
        done = await acknowledge(server, claim_id="trainer", session_ids=["a", "b"])
        assert done == {"acknowledged": ["b"], "lost": {"a": None}}
        await withdraw(server, "b")  # it was trained: its claim may say so again
        assert (await acknowledge(server, claim_id="trainer", session_ids=["b"]))["acknowledged"] == ["b"]
        assert await held(server, limit=8) == []


async def test_a_group_is_whole_without_it_and_waits_for_the_one_that_replaces_it(
    tmp_path: Path, database_url: str
) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "a", "b", "c", group_id="g", group_size=3)
        await end(server, a=1.0, b=0.0, c=1.0)
        await withdraw(server, "b")
        assert await held(server, limit=8) == []
        waiting = asyncio.create_task(claim(server, wait_s=60))
        await start(server, "b2", group_id="g", group_size=3)
        await end(server, b2=0.5)
        export = {"layout": "concat", "advantages": "leave_one_out"}
        assert list(entries(await waiting)) == ["a", "c", "b2"]
        told = entries(await server.ok("/trajectories/export", {"filter": {"group_id": "g"}, **export}))
        assert {name: entry["group_members"] for name, entry in told.items()} == {"a": 3, "c": 3, "b2": 3}


async def test_a_group_does_not_wait_for_a_live_session_that_is_withdrawn(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "a", "b", "stuck", group_id="g", group_size=2)
        await end(server, a=1.0, b=0.0)
        waiting = asyncio.create_task(claim(server, wait_s=60))
        await withdraw(server, "stuck")
        assert list(entries(await waiting)) == ["a", "b"]


async def test_exports_leave_it_out_and_count_it_unless_they_name_it(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "kept", "gone", group_id="g")
        await finish(server, "measured", group_id="g", metadata={"validate": True})
        await finish(server, "both", group_id="g", metadata={"validate": True})
        for name in ("gone", "both"):
            await withdraw(server, name)
        for chosen in ({}, {"filter": {"group_id": "g"}}, {"filter": {"status": "ended"}}):
            told = await export(server, **chosen)
            assert list(entries(told)) == ["kept"]
            assert told["left_out"] == {"validation": 1, "withdrawn": 2}
        told = await export(server, filter={"validation": "include"})
        assert (list(entries(told)), told["left_out"]) == (["kept", "measured"], {"withdrawn": 2})
        assert (await export(server, filter={"validation": "only"}))["left_out"] == {"withdrawn": 1}
        response = await server.post("/trajectories/export", {})
        counted = {
            name[len(LEFT_OUT) :]: value for name, value in response.headers.items() if name.startswith(LEFT_OUT)
        }
        assert counted == {"": "3", "-validation": "1", "-withdrawn": "2"}
        named = await export(server, session_id="gone")
        assert list(entries(named)) == ["gone"]
        assert len(named["samples"]) == 1
        assert "left_out" not in named
        several = await export(server, session_ids=["kept", "gone"], filter={"group_id": "g"})
        assert list(entries(several)) == ["kept", "gone"]


async def test_listings_show_it_and_filter_by_it_and_groups_do_without(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "kept", "gone", group_id="g")
        await withdraw(server, "gone")

        async def listed(path: str, text: str = "{}") -> Any:
            return (await server.http.get(path, params={"filter": text})).json()

        every = (await listed("/rl/sessions"))["sessions"]
        assert [(each["session_id"], each["withdrawn"]) for each in every] == [("kept", False), ("gone", True)]
        for text, names in (('{"withdrawn": true}', ["gone"]), ('{"withdrawn": false}', ["kept"])):
            found = (await listed("/rl/sessions", text))["sessions"]
            assert [each["session_id"] for each in found] == names
        assert [group["sessions"] for group in (await listed("/rl/groups"))["groups"]] == [1]
        [group] = (await listed("/rl/groups", '{"withdrawn": true}'))["groups"]
        assert group["sessions"] == 1
        refused = await server.http.get("/rl/sessions", params={"filter": '{"withdrawn": 1}'})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "filter.withdrawn")


async def test_a_live_session_gives_its_capacity_back_and_an_ended_one_its_staleness(
    tmp_path: Path, database_url: str
) -> None:
    async with served(tmp_path, database_url, capacity_control=True) as server:
        await server.ok("/rl/grant_capacity", {"n": 1})
        for name in ("one", "two"):
            await server.ok("/rl/start_session", {"session_id": name})
            await withdraw(server, name)
        assert await server.ok("/rl/grant_capacity", {"n": 1}) == {"capacity": 2}


async def test_a_withdrawn_session_is_none_of_those_that_staleness_counts(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, max_staleness=0, batch_size=1) as server:
        await finish(server, "a")
        assert (await server.post("/rl/start_session", {"session_id": "b"})).status_code == 429
        await withdraw(server, "a")
        await server.ok("/rl/start_session", {"session_id": "b"})
        assert (await server.post("/rl/start_session", {"session_id": "c"})).status_code == 429


async def test_another_server_sees_it_and_may_withdraw_it_too(tmp_path: Path, postgres_url: str) -> None:
    async with two_servers(tmp_path, postgres_url) as (one, two):
        await start(one, "s", "t", group_id="g")
        await end(two, t=1.0)
        assert await withdraw(two, "s") == await withdraw(one, "s") == {"interaction_count": 1}
        assert await withdraw(one, "t") == {"interaction_count": 1}
        for server in (one, two):
            assert [(await shown(server, name))["withdrawn"] for name in "st"] == [True, True]
            await server.ok("/s/rl/set_reward", {"reward": 1.0})
            assert await held(server, limit=8) == []
        answers = await asyncio.gather(*(withdraw(server, "s") for server in (one, two) for _ in range(3)))
        assert answers == [{"interaction_count": 1}] * 6


async def test_it_survives_a_restart_and_leaves_a_sound_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    async with served(tmp_path, url) as server:
        await finish(server, "gone", "kept")
        await withdraw(server, "gone")
        await start(server, "live")
        await withdraw(server, "live")
    async with served(tmp_path, url) as server:
        assert [(await shown(server, name))["withdrawn"] for name in ("gone", "live", "kept")] == [True, True, False]
        assert await withdraw(server, "gone") == {"interaction_count": 1}
        assert await held(server, limit=8) == ["kept"]
    with inspecting(url) as inspection:
        assert audit(inspection).findings == []


async def test_no_claim_gets_the_session_of_a_runner_and_exports_have_it(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "own", delivery="runner")
        await finish(server, "queued", delivery="queue")
        await finish(server, "default")
        assert [(await shown(server, name))["delivery"] for name in ("own", "queued", "default")] == [
            *("runner", "queue", "queue")
        ]
        assert await held(server, limit=8) == ["queued", "default"]
        for chosen in ({"session_id": "own"}, {"filter": {"task_id": "own"}}):
            assert list(entries(await export(server, **chosen))) == ["own"]
        assert (await acknowledge(server, session_ids=["own"])) == {"acknowledged": ["own"], "lost": {}}
        assert (await acknowledge(server, session_ids=["own"], claim_id="x"))["lost"] == {"own": None}


async def test_a_group_waits_for_sessions_of_the_queue_only(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "own", group_id="g", group_size=2, delivery="runner")
        await start(server, "a", "b", group_id="g", group_size=2)
        await end(server, a=1.0)
        assert await held(server, limit=8) == []
        await end(server, b=0.0)
        assert await held(server, limit=8) == ["a", "b"]


async def test_another_word_for_who_delivers_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for word in ("trainer", "", 1):
            refused = await server.post("/rl/start_session", {"session_id": "s", "delivery": word})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "delivery")
            assert "queue, runner" in error["message"]
        await server.ok("/rl/start_session", {"session_id": "s", "delivery": None})


async def test_pruning_takes_what_was_withdrawn_and_keeps_what_no_runner_has_exported(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    async with served(tmp_path, url) as server:
        await finish(server, "gone")
        await withdraw(server, "gone")
        await finish(server, "own", "exported", delivery="runner")
        await export(server, session_id="exported")
    execute(url, "UPDATE sessions SET ended_at = 1.0")
    assert prune(url, 3600.0, dry_run=False).sessions == 2
    assert execute(url, "SELECT session_id FROM sessions") == [("own",)]


async def test_a_dump_and_its_import_keep_both(tmp_path: Path, database_url: str, postgres: Postgres) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "own", delivery="runner")
        await finish(server, "gone", "kept")
        await withdraw(server, "gone")
    export_all(database_url, str(tmp_path / "dump.jsonl"), lambda *_: None)
    copied = postgres.create_database()
    import_all(copied, tmp_path / "dump.jsonl", Conflict.REFUSE, lambda *_: None)
    columns = "session_id, delivery, withdrawn_at, acknowledged_at"
    rows = [execute(url, f"SELECT {columns} FROM sessions ORDER BY number") for url in (database_url, copied)]
    assert rows[0] == rows[1]
    with inspecting(copied) as inspection:
        assert audit(inspection).findings == []
    async with served(tmp_path, copied) as server:
        assert await held(server, limit=8) == ["kept"]


async def test_what_waits_for_trainers_is_counted_without_them(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "gone", "kept")
        await finish(server, "own", delivery="runner")
        await withdraw(server, "gone")
        told = (await server.http.get("/metrics")).text
        assert 'tokengrove_stored_sessions{state="waiting"} 1' in told
        assert "tokengrove_sessions_withdrawn_total 1" in told
