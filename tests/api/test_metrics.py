"""`/metrics`: what it counts, and who may read it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.engine.scripted.scripts import Reply, play
from proxy.settings import Settings
from proxy.store import counted_backlog
from tests.support import Server, real_server, sampled, says, serving, until, user
from tokengrove.errors import ConfigurationError, StoreUnavailable


async def shown(server: Server, **headers: str) -> dict[str, float]:
    """The series of `/metrics`, as Prometheus names them."""
    answer = await server.http.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    return {
        sample.name + "".join(f'{{{name}="{value}"}}' for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path, says(*["yes"] * 8)) as opened:
        yield opened


async def test_a_metric_that_fails_fails_no_turn_and_no_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = server.app.state.metrics
    monkeypatch.setattr(metrics.turns.phases, "counts", None)
    monkeypatch.setattr(metrics.http.duration, "counts", None)
    answer = await server.answer([user("a")])
    await server.answer([user("a"), answer, user("b")])
    nodes = (await server.http.get("/rl/sessions/s")).json()["interactions"]
    assert [(node["status"], node["parent_id"]) for node in nodes] == [("complete", None), ("complete", nodes[0]["id"])]
    assert "a turn could not be counted" in caplog.text and "the end of a request could not be told" in caplog.text


async def test_requests_are_counted_by_route_status_and_error(server: Server) -> None:
    await server.chat([user("a")], "secret~session")
    await server.chat([user("b")], "other")
    await server.post("/other/v1/chat/completions", {"model": "m", "messages": 1})
    await server.http.get("/no/such/path")
    await server.http.request("BREW", "/no/such/path")
    found = await shown(server)
    route = '{route="/v1/chat/completions"}'
    name = "tokengrove_http_requests_total"
    assert {key: value for key, value in found.items() if key.startswith(name) and value} == {
        f'{name}{{method="POST"}}{route}{{status="200"}}': 2.0,
        f'{name}{{method="POST"}}{route}{{status="400"}}': 1.0,
        f'{name}{{method="GET"}}{{route="unmatched"}}{{status="404"}}': 1.0,
        f'{name}{{method="other"}}{{route="unmatched"}}{{status="404"}}': 1.0,
    }
    assert found[f'{name}{{method="POST"}}{route}{{status="503"}}'] == 0.0, "a first failure is then an increase"
    errors = {key: value for key, value in found.items() if key.startswith("tokengrove_errors_total")}
    assert errors.pop('tokengrove_errors_total{code="invalid_request"}') == 1.0
    assert errors.pop('tokengrove_errors_total{code="not_found"}') == 2.0
    assert 'tokengrove_errors_total{code="store_unavailable"}' in errors and not any(errors.values())
    assert found[f"tokengrove_http_request_seconds_count{route}"] == 3.0
    assert not [key for key in found if "secret" in key or "other~" in key]


async def test_refusals_are_counted_by_their_code(tmp_path: Path) -> None:
    async with serving(tmp_path, says("yes"), max_live_sessions=1) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "task_id": "t"})
        refused = await server.post("/rl/start_session", {"session_id": "s2", "task_id": "t"})
        found = await shown(server)
    code = refused.json()["error"]["code"]
    assert refused.status_code == 429 and found[f'tokengrove_errors_total{{code="{code}"}}'] == 1.0


async def test_a_session_is_counted_from_its_start_to_its_deletion(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_backlog, "_EVERY_S", 0.0)
    monkeypatch.setattr(counted_backlog, "_SHARE", 0)
    for name in ("a", "b"):
        await server.ok("/rl/start_session", {"session_id": name, "task_id": "t"})
    await server.chat([user("hi")], "a")
    await server.ok("/a/rl/set_reward", {"reward": 1.0})
    begun = await shown(server)
    assert begun['tokengrove_stored_sessions{state="active"}'] == 2.0
    assert begun["tokengrove_claim_wait_seconds"] == 0.0 and begun["tokengrove_rewards_set_total"] == 1.0
    await server.ok("/a/rl/end_session", {"outcome": "Finished", "reward": 0.5})
    await server.ok("/b/rl/end_session", {})
    ended = await shown(server)
    assert ended["tokengrove_sessions_started_total"] == 2.0 and ended["tokengrove_rewards_set_total"] == 2.0
    assert ended['tokengrove_sessions_ended_total{outcome="Finished"}'] == 1.0
    assert ended['tokengrove_sessions_ended_total{outcome="none"}'] == 1.0
    assert ended['tokengrove_stored_sessions{state="waiting"}'] == 2.0
    assert ended["tokengrove_claim_wait_seconds"] > 0.0
    await server.ok("/trajectories/claim", {"claim_id": "c", "limit": 1, "export": {}})
    leased = await shown(server)
    states = {state: leased[f'tokengrove_stored_sessions{{state="{state}"}}'] for state in ("waiting", "leased")}
    assert states == {"waiting": 1.0, "leased": 1.0}
    assert leased["tokengrove_exported_sessions_total"] == 1.0 and leased["tokengrove_exported_samples_total"] == 1.0
    assert leased['tokengrove_export_seconds_count{format="json"}'] == 1.0
    assert (await server.http.request("DELETE", "/rl/sessions/b")).status_code == 200
    assert (await shown(server))["tokengrove_sessions_deleted_total"] == 1.0


async def test_a_retry_is_counted_as_attached_or_replayed(tmp_path: Path) -> None:
    async with serving(tmp_path, play([Reply(sampled("one two three"), delay_s=0.03)])) as server:
        body, mark = {"model": "m", "messages": [user("hi")]}, {"idempotency-key": "k"}
        first = asyncio.create_task(server.post("/s/v1/chat/completions", body, headers=mark))
        await until(lambda: bool(server.engine.requests))
        for _ in range(2):
            assert (await server.post("/s/v1/chat/completions", body, headers=mark)).status_code == 200
        await first
        found = await shown(server)
    kinds = {kind: found[f'tokengrove_retries_total{{kind="{kind}"}}'] for kind in ("attached", "replayed")}
    assert kinds == {"attached": 1.0, "replayed": 1.0}
    assert found['tokengrove_turns_total{api="chat"}{status="complete"}'] == 1.0


async def test_a_turn_is_counted_by_its_tokens_and_phases(server: Server) -> None:
    await server.chat([user("hi")], "s")
    found = await shown(server)
    phases = {key for key in found if key.startswith("tokengrove_turn_phase_seconds_count")}
    assert phases == {
        f'tokengrove_turn_phase_seconds_count{{phase="{phase}"}}'
        for phase in ("queue", "match", "render", "generate", "commit")
    }
    assert found["tokengrove_first_token_seconds_count"] == 1.0 == found["tokengrove_turn_seconds_count"]
    assert found['tokengrove_tokens_total{kind="output"}'] > 1.0
    assert found["tokengrove_output_token_seconds_count"] == 1.0
    assert found["tokengrove_transaction_seconds_count"] >= 1.0


async def test_a_pause_shows_while_it_lasts_and_is_counted_at_its_end(server: Server) -> None:
    assert (await shown(server))["tokengrove_engine_paused"] == 0.0
    await server.ok("/engine/pause_generation", {"mode": "in_place"})
    assert (await shown(server))["tokengrove_engine_paused"] == 1.0
    await server.ok("/engine/continue_generation", {})
    found = await shown(server)
    assert found["tokengrove_engine_paused"] == 0.0
    assert found['tokengrove_engine_pause_seconds_count{mode="in_place"}'] == 1.0


async def test_a_scrape_has_every_metric_with_the_labels_that_it_declares(server: Server) -> None:
    await server.ok("/rl/start_session", {"session_id": "s", "task_id": "t"})
    await server.chat([user("hi")], "s")
    await server.ok("/s/rl/end_session", {"reward": 1.0})
    (sample,) = (await server.ok("/trajectories/export", {}))["samples"]
    told = {"turns": sample["turns"], "streams": {"logprobs": sample["logprobs"]}}
    await server.ok("/trajectories/annotate", {"step": 0, "samples": [told]})
    await server.post("/s/v1/chat/completions", {})
    await server.ok("/engine/pause_generation", {"mode": "abort"})
    await server.ok("/engine/continue_generation", {})
    declared = {family.name: set(family.labels) for family in server.app.state.metrics.families}
    found = list(text_string_to_metric_families((await server.http.get("/metrics")).text))
    assert [family.name for family in found] == [*declared]
    for family in found:
        assert family.documentation, family.name
        assert all(sample.labels.keys() - {"le"} == declared[family.name] for sample in family.samples), family.name
    of_pools = {name for name in declared if name.startswith("tokengrove_engine_server")}
    of_others = {"tokengrove_connections", "tokengrove_connections_limit", "tokengrove_queued_choices"}
    of_others |= {"tokengrove_route_turns"}
    assert {family.name for family in found if not family.samples} == of_pools | of_others


async def test_the_process_and_its_room_are_shown(server: Server) -> None:
    found = await shown(server)
    assert found["tokengrove_processes"] == 1.0 and found["process_resident_memory_bytes"] > 1e7
    assert found["process_open_fds"] > 0 and found["process_start_time_seconds"] > 1e9
    assert found["tokengrove_body_bytes"] == 0.0 and found["tokengrove_body_bytes_limit"] == 8 * 32 * 2**20
    assert any(key.startswith("tokengrove_build_info{version=") for key in found)


async def test_a_database_that_does_not_answer_is_down_and_says_nothing_of_sessions(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await shown(server))["tokengrove_database_up"] == 1.0
    backlog = server.app.state.store.backlog

    async def fails(*_: object) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(backlog._database, "read_at_once", fails)
    backlog._again_at = 0.0
    found = await shown(server)
    assert found["tokengrove_database_up"] == 0.0
    assert not [key for key in found if key.startswith(("tokengrove_stored_sessions", "tokengrove_claim_wait"))]


async def test_the_database_is_not_asked_again_by_every_scrape(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    database, asked = server.app.state.store.database, 0
    read = database.read_at_once

    async def counted(*arguments: object) -> object:
        nonlocal asked
        asked += 1
        return await read(*arguments)

    monkeypatch.setattr(database, "read_at_once", counted)
    await asyncio.gather(*(shown(server) for _ in range(5)))
    await shown(server)
    assert asked == 1


KEYS = {"admin_key": "admin", "metrics_key": "m1,m2"}


@pytest.mark.parametrize("key", ["m1", "m2", "admin"])
async def test_the_metrics_key_and_the_admin_key_open_the_metrics(tmp_path: Path, key: str) -> None:
    async with serving(tmp_path, says("yes"), **KEYS) as server:
        assert "tokengrove_in_flight" in await shown(server, authorization=f"Bearer {key}")


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic m1"}])
async def test_nobody_else_reads_the_metrics(tmp_path: Path, headers: dict[str, str]) -> None:
    async with serving(tmp_path, says("yes"), **KEYS) as server:
        answer = await server.http.get("/metrics", headers=headers)
        assert answer.status_code == 401 and "tokengrove_" not in answer.text
        assert "--metrics-key" in answer.json()["error"]["message"]
        assert (await server.http.get("/health")).status_code == 200


async def test_the_metrics_key_opens_nothing_else(tmp_path: Path) -> None:
    async with serving(tmp_path, says("yes"), **KEYS) as server:
        headers = {"authorization": "Bearer m1"}
        started = await server.post("/rl/start_session", {"task_id": "t"}, headers=headers)
        assert started.status_code in (401, 403)
        assert (await server.http.get("/engine", headers=headers)).status_code in (401, 403)


async def test_without_a_metrics_key_the_metrics_are_open(tmp_path: Path) -> None:
    async with serving(tmp_path, says("yes"), admin_key="admin") as server:
        assert await shown(server)


def test_a_port_of_its_own_has_the_metrics_and_nothing_for_agents(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with real_server(tmp_path, metrics_port=port) as url, httpx.Client() as http:
        watch = f"http://127.0.0.1:{port}"
        assert "tokengrove_in_flight" in http.get(f"{watch}/metrics").text
        assert [http.get(f"{each}{path}").status_code for each in (watch, url) for path in ("/health", "/ready")] == [
            200
        ] * 4
        hidden = http.get(f"{url}/metrics")
        assert hidden.status_code == 404 and str(port) in hidden.json()["error"]["message"]
        for path in ("/v1/models", "/rl/sessions", "/engine"):
            refused = http.get(f"{watch}{path}")
            assert refused.status_code == 404 and "--metrics-port" in refused.json()["error"]["message"]
            assert http.get(f"{url}{path}").status_code == 200


@pytest.mark.parametrize(
    ("port", "why"), [(0, "between 1 and 65535"), (70_000, "between 1 and 65535"), (8080, "is --port")]
)
def test_a_port_for_metrics_that_cannot_be_is_refused(port: int, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--metrics-port.*{why}"):
        Settings(metrics_port=port)
