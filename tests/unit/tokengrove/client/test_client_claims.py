"""Both clients claim and acknowledge sessions as the endpoints define it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import real_server
from tokengrove.client import Acknowledged, AsyncClient, Claim, Client, Export, ServerUnreachable, operations
from tokengrove.client.adapters.trl import ClaimingWorker
from tokengrove.client.options import Format
from tokengrove.errors import InvalidRequest, NotFound


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with real_server(tmp_path) as url:
        yield url


def play(url: str, name: str, group: str = "g") -> None:
    with Client(url) as client, client.session(name, session_id=name, group_id=group) as session:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        httpx.post(session.base_url + "/chat/completions", json=body).raise_for_status()
        session.set_reward(0.5)


def test_a_claim_brings_ids_and_where_asked_for_the_samples(server: str) -> None:
    for name in ("a", "b", "c"):
        play(server, name)
    with Client(server) as client:
        first = client.claim(limit=2, consumer="me", lease_s=60.0)
        assert ([*first.sessions], first.export) == (["a", "b"], None)
        assert first.claim_id is not None and first.claim_id.startswith("me-")
        second = client.claim(limit=2, export={"layout": "concat"}, filter={"group_id": "g"})
        assert [*second.sessions] == ["c"]
        assert second.export is not None
        [sample] = second.export.samples
        assert (sample.session_id, sample.rewards.tolist()) == ("c", [0.5])
        assert client.acknowledge(first) == Acknowledged(("a", "b"), {})
        assert client.acknowledge(second.claim_id) == Acknowledged(("c",), {})


@pytest.mark.parametrize("name", ["json", "jsonl", "areal", "npz", "safetensors", "arrow", "parquet"])
def test_a_claim_brings_its_samples_in_any_format(server: str, name: Format) -> None:
    for session in ("b", "a"):
        play(server, session)
    with Client(server) as client:
        claim = client.claim(limit=2, consumer="me", lease_s=60.0, export={"layout": "concat", "format": name})
        assert [*claim.sessions] == ["b", "a"]
        assert claim.claim_id is not None and claim.claim_id.startswith("me-") and claim.lease_until is not None
        assert claim.export is not None
        assert [sample.session_id for sample in claim.export.samples] == ["b", "a"]
        assert client.acknowledge(claim) == Acknowledged(("b", "a"), {})
        assert client.claim(export={"format": name}) == Claim(None, {}, None, Export([], {}))


def test_nothing_is_leased_to_a_client_that_cannot_read_it(server: str) -> None:
    play(server, "a")
    with Client(server) as client:
        with pytest.raises(InvalidRequest, match="format"):
            client.claim(export={"format": "pickle"})  # type: ignore[typeddict-item]
        assert [*client.claim().sessions] == ["a"]


def test_nothing_to_claim_is_an_empty_claim_and_nothing_to_acknowledge(server: str) -> None:
    with Client(server) as client:
        nothing = client.claim(wait_s=0.01)
        assert nothing == Claim(None, {}, None, None)
        assert client.acknowledge(nothing) == Acknowledged((), {})


def test_a_lost_lease_is_reported_and_an_unknown_claim_is_refused(server: str) -> None:
    play(server, "a")
    with Client(server) as client:
        late = client.claim(lease_s=0.0)
        mine = client.claim(claim_id="mine")
        assert client.acknowledge(late) == Acknowledged((), {"a": "mine"})
        assert client.acknowledge(mine, ["a"]).sessions == ("a",)
        with pytest.raises(NotFound):
            client.acknowledge("nobody's")
        with pytest.raises(InvalidRequest):
            client.acknowledge()


def test_nothing_is_leased_to_a_client_that_left_while_it_waited(server: str) -> None:
    with Client(server, timeout_s=0.5, retry_s=0.0) as leaves, pytest.raises(ServerUnreachable):
        leaves.run(iter_claim(600.0))
    play(server, "a")
    with Client(server) as client:
        assert [*client.claim(wait_s=60.0).sessions] == ["a"]


def iter_claim(wait_s: float) -> operations.Steps[None]:
    """A claim with a timeout of the client that is shorter than the wait it asks the server for."""
    yield operations.Call("POST", "/trajectories/claim", {"wait_s": wait_s, "consumer": "gone"})


def test_trls_worker_claims_only_whole_groups(server: str) -> None:
    for name in ("a", "b"):
        play(server, name)
    worker = ClaimingWorker(server, group_size=3, consumer="trainer", lease_s=1.0)
    assert [*worker._claim().sessions] == []
    play(server, "c")
    claim = worker._claim()
    assert ([*claim.sessions], claim.export is not None) == (["a", "b", "c"], True)
    assert claim.claim_id is not None and claim.claim_id.startswith("trainer-")
    worker.stop()


def test_trls_worker_gives_back_what_it_could_not_deliver(server: str) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    play(server, "a")
    worker = ClaimingWorker(server, group_size=1)
    claim = worker._claim()
    assert claim.claim_id is not None and claim.export is not None
    worker._stop.set()
    worker._deliver(claim.claim_id, claim.sessions, claim.export.samples)
    with Client(server) as client:
        assert [*client.claim().sessions] == ["a"]
    worker.stop()


def test_the_client_warns_of_advantages_that_compare_nothing(server: str) -> None:
    play(server, "a")
    play(server, "b")
    with Client(server) as client:
        with pytest.warns(UserWarning, match="session a: its group has no other score"):
            client.export(session_id="a", advantages="grpo")
        assert client.export(filter={"group_id": "g"}, advantages="grpo").sessions["a"]["group_members"] == 2
    play(server, "c", group="h")
    with Client(server) as client, pytest.warns(UserWarning, match="no other score"):
        client.claim(filter={"group_id": "h"}, export={"layout": "concat", "advantages": "grpo"})


async def test_the_asyncio_client_claims_and_acknowledges_the_same(server: str) -> None:
    play(server, "a")
    async with AsyncClient(server) as client:
        claim = await client.claim(export={"layout": "concat"})
        assert [*claim.sessions] == ["a"]
        assert claim.export is not None and len(claim.export.samples) == 1
        assert await client.acknowledge(claim) == Acknowledged(("a",), {})
