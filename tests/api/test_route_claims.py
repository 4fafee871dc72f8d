"""Each trained route has a queue of its own: a session is delivered once for each that it has turns of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.pruning import prune
from tests.databases import execute
from tests.routed import ONE_TRAINED, TWO_TRAINED, record
from tests.support import Server, says, serving


async def claimed(server: Server, **body: Any) -> list[str]:
    answer = await server.ok("/trajectories/claim", {"limit": 10, **body})
    return [session["session_id"] for session in answer["sessions"]]


async def refusal(server: Server, path: str, body: Any) -> tuple[int, str | None]:
    response = await server.post(path, body)
    return response.status_code, response.json()["error"]["param"]


async def test_a_session_is_delivered_once_for_each_trained_route_that_it_has(
    tmp_path: Path, database_url: str
) -> None:
    await record(database_url, "both", "policy", "opponent", "rival")
    await record(database_url, "rivals", "rival")
    await record(database_url, "own", "policy", "judge")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        assert await claimed(server, route="rival", claim_id="r") == ["both", "rivals"]
        assert await claimed(server, route="rival") == []
        assert await claimed(server, route="policy", claim_id="p") == ["both", "own"]
        assert await claimed(server, route="policy", claim_id="p") == ["both", "own"], "repeated"
        assert await server.ok("/trajectories/acknowledge", {"claim_id": "r"}) == {
            "acknowledged": ["both", "rivals"],
            "lost": {},
        }
        given_back = {"route": "policy", "claim_id": "p", "lease_s": 0, "renew": True}
        await server.ok("/trajectories/claim", given_back)
        assert await claimed(server, route="rival") == [], "acknowledged"
        assert await claimed(server, route="policy", claim_id="again") == ["both", "own"], "still to be trained on"


async def test_a_claim_with_samples_has_those_of_its_route(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "both", "policy", "opponent", "rival", "rival")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        options = {"layout": "individual", "advantages": "grpo", "unrewarded": "zero"}
        for route, count in (("policy", 1), ("rival", 2)):
            answer = await server.ok("/trajectories/claim", {"route": route, "export": options})
            assert [sample["route"] for sample in answer["samples"]] == [route] * count
        inside = {"route": "rival", "export": {"route": ["policy"]}}
        assert await refusal(server, "/trajectories/claim", inside) == (400, "route")


async def test_with_several_trained_routes_a_claim_names_one(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "both", "policy", "rival")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        for body in ({}, {"route": "opponent"}, {"route": "judge"}, {"route": "x"}, {"export": {}}):
            assert await refusal(server, "/trajectories/claim", body) == (400, "route"), body
        assert await refusal(server, "/trajectories/acknowledge", {"session_ids": ["both"]}) == (400, "route")
        done = {"session_ids": ["both"], "route": "rival"}
        assert await server.ok("/trajectories/acknowledge", done) == {"acknowledged": ["both"], "lost": {}}
        assert await claimed(server, route="policy") == ["both"]


async def test_with_one_trained_route_claims_are_as_without_a_table(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "s", "policy", "opponent")
    await record(database_url, "watched", "opponent")
    async with serving(tmp_path, says(), database_url=database_url, models=ONE_TRAINED) as server:
        answer = await server.ok("/trajectories/claim", {"limit": 5, "export": {}})
        assert [entry["session_id"] for entry in answer["sessions"]] == ["s", "watched"]
        assert [sample["route"] for sample in answer["samples"]] == ["policy"]
        assert await claimed(server, route="policy") == []


async def test_a_group_is_claimed_whole_for_each_route(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "a", "policy", "rival", group_id="g", group_size=2)
    await record(database_url, "b", "rival", group_id="g", group_size=2, ended=False)
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        assert await claimed(server, route="rival") == []
        await server.ok("/b/rl/end_session", {})
        assert await claimed(server, route="rival") == ["a", "b"]
        assert await claimed(server, route="policy") == ["a"], "b has no turn of it"


async def test_a_claim_that_waits_gets_the_session_that_ends(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "s", "policy", "rival", ended=False)
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        waiting = asyncio.create_task(claimed(server, route="rival", wait_s=60))
        await server.ok("/s/rl/end_session", {})
        assert await waiting == ["s"]


async def test_an_expired_lease_of_a_route_is_free_again(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "s", "rival", "policy")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        assert await claimed(server, route="rival", claim_id="one") == ["s"]
        execute(database_url, "UPDATE session_routes SET claimed_until = 1 WHERE claimed_until IS NOT NULL")
        assert await claimed(server, route="rival", claim_id="two") == ["s"]
        lost = await server.ok("/trajectories/acknowledge", {"claim_id": "one", "session_ids": ["s"], "route": "rival"})
        assert lost == {"acknowledged": [], "lost": {"s": "two"}}


async def test_a_withdrawn_session_leaves_the_queue_of_every_route(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "s", "policy", "rival")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        await server.ok("/s/rl/withdraw_session", {})
        assert [await claimed(server, route=route) for route in ("policy", "rival")] == [[], []]


async def test_statistics_count_the_queue_of_each_route(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "both", "policy", "rival")
    await record(database_url, "rivals", "rival")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        await claimed(server, route="rival", limit=1)
        read = (await server.http.get("/rl/statistics")).json()["sessions"]
        assert read["by_route"] == {"rival": {"waiting": 1, "leased": 1}}


async def test_a_session_of_other_routes_only_leaves_the_backlog_with_the_last_of_them(
    tmp_path: Path, database_url: str
) -> None:
    await record(database_url, "rivals", "rival")
    await record(database_url, "both", "rival", "policy")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        await claimed(server, route="rival", claim_id="r")
        await server.ok("/trajectories/acknowledge", {"claim_id": "r"})
        assert (await server.http.get("/rl/statistics")).json()["sessions"]["waiting"] == 1
        assert await claimed(server, route="policy", claim_id="p") == ["both"]


async def test_prune_keeps_a_session_until_each_route_has_acknowledged_it(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "s", "policy", "rival")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        await server.ok("/trajectories/acknowledge", {"session_ids": ["s"], "route": "policy"})
        await server.export("s", route=["policy"])
    assert (await asyncio.to_thread(prune, database_url, 0.0, dry_run=True)).kept == 1
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        await server.ok("/trajectories/acknowledge", {"session_ids": ["s"], "route": "rival"})
    assert (await asyncio.to_thread(prune, database_url, 0.0, dry_run=False)).sessions == 1
    assert execute(database_url, "SELECT * FROM session_routes") == []


async def test_a_claim_under_an_older_table_can_be_acknowledged(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "s", "policy", "rival")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        await claimed(server, route="rival", claim_id="r")
    async with serving(tmp_path, says(), database_url=database_url) as server:
        assert (await server.ok("/trajectories/acknowledge", {"claim_id": "r"}))["acknowledged"] == ["s"]
        for body in ({"route": "rival"}, {"route": ""}):
            assert await refusal(server, "/trajectories/claim", body) == (400, "route")


async def test_a_dump_keeps_routes_and_what_is_acknowledged(tmp_path: Path, database_url: str) -> None:
    await record(database_url, "s", "policy", "opponent", "rival", "judge")
    await record(database_url, "t", "rival")
    async with serving(tmp_path, says(), database_url=database_url, models=TWO_TRAINED) as server:
        await server.ok("/trajectories/acknowledge", {"session_ids": ["s"], "route": "rival"})
        await claimed(server, route="rival", claim_id="leased")
        before = await server.tree("s")
    dump = tmp_path / "all.jsonl"
    await asyncio.to_thread(export_all, database_url, str(dump), lambda _: None)
    copy = f"sqlite:///{tmp_path / 'copy.db'}"
    await asyncio.to_thread(import_all, copy, dump, Conflict.REFUSE, lambda _: None)
    async with serving(tmp_path, says(), database_url=copy, models=TWO_TRAINED) as server:
        assert await server.tree("s") == before
        assert await claimed(server, route="rival") == ["t"], "a lease ends with its server"
        assert await claimed(server, route="policy") == ["s"]


@pytest.mark.parametrize("models", [None, ONE_TRAINED])
async def test_a_server_of_one_policy_needs_no_route(tmp_path: Path, database_url: str, models: str | None) -> None:
    await record(database_url, "s", "")
    async with serving(tmp_path, says(), database_url=database_url, models=models) as server:
        assert await claimed(server, claim_id="c") == ["s"]
        assert (await server.ok("/trajectories/acknowledge", {"claim_id": "c"}))["acknowledged"] == ["s"]


async def test_trainers_of_two_servers_share_the_queue_of_a_route(tmp_path: Path, postgres_url: str) -> None:
    names = [f"s{number:02}" for number in range(24)]
    for name in names:
        await record(postgres_url, name, "policy", "rival")
    both = (
        serving(tmp_path, says(), database_url=postgres_url, models=TWO_TRAINED),
        serving(tmp_path, says(), database_url=postgres_url, models=TWO_TRAINED),
    )
    async with both[0] as one, both[1] as two:

        async def train(server: Server, route: str) -> list[tuple[str, str]]:
            done: list[tuple[str, str]] = []
            while answer := (await server.ok("/trajectories/claim", {"route": route, "limit": 3}))["claim_id"]:
                acknowledged = await server.ok("/trajectories/acknowledge", {"claim_id": answer})
                done += [(route, name) for name in acknowledged["acknowledged"]]
            return done

        trainers = [train(server, route) for server in (one, two) for route in ("policy", "rival", "rival")]
        found = [each for done in await asyncio.gather(*trainers) for each in done]
    assert sorted(found) == sorted((route, name) for name in names for route in ("policy", "rival"))
