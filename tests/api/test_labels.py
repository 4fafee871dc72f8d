"""What the metadata of a session says of its training run stands on each of its log lines and spans, and filters."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.telemetry.session_labels import LABELS, labels_of
from proxy.turns import turns
from tests.exports import entries
from tests.logs import fields_of, lines_of
from tests.support import Server, sampled, says, serving, until, user
from tests.workers import workers_of
from tokengrove.spans import Tracing

LABELLED: dict[str, Any] = {
    **{"project": "gsm 8k", "experiment": "grpo-1", "step": 12, "sample_index": 3, "rollout_n": 8, "validate": False},
}
METADATA = {**LABELLED, "answer": "never-shown", "env": {"seed": 1}}
ADMIN = "root"


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "proxy")
    caplog.set_level(logging.DEBUG, "tokengrove.audit")


def labels(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in LABELS if name in fields}


def lines_with_a_session(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [(record.msg, record.args) for record in caplog.records if isinstance(record.args, dict)]
    return [{"event": event, **fields} for event, fields in found if fields.get("session") is not None]


def routes(lines: list[dict[str, Any]]) -> set[str]:
    return {line.get("route") or line.get("action") or line["event"] for line in lines}


async def started(server: Server, **more: Any) -> dict[str, Any]:
    body = {"task_id": "t", "session_id": "run", "metadata": METADATA, **more}
    reply: dict[str, Any] = await server.ok("/rl/start_session", body, headers={"x-api-key": ADMIN})
    return reply


async def test_every_line_of_a_session_says_to_which_run_it_belongs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replies = play([Reply(sampled("one")), Reply(sampled("two"), fault=Fault.ERROR, fault_after=1)])
    async with serving(tmp_path, replies, admin_key=ADMIN) as server:
        admin = {"x-api-key": ADMIN}
        keys = await started(server)
        agent, control = {"x-api-key": keys["api_key"]}, {"x-api-key": keys["control_key"]}
        chat = {"messages": [user("hi")]}
        await server.ok("/run/v1/chat/completions", chat, headers=agent)
        assert (await server.post("/v1/chat/completions", chat, headers=agent)).status_code >= 500
        await server.ok("/run/v1/tokenize", chat, headers=agent)
        assert (await server.post("/run/v1/chat/completions", chat)).status_code == 401
        assert (await server.post("/run/v1/chat/completions", {}, headers=agent)).status_code == 400
        await server.ok("/run/rl/set_reward", {"reward": 1}, headers=control)
        await server.ok("/rl/mark", {"turn": 0, "trainable": True}, headers=control)
        await server.ok("/run/rl/rotate_keys", {"keys": ["agent"]}, headers=control)
        await server.ok("/rl/end_session", {}, headers=control)
        assert (await server.post("/run/v1/chat/completions", chat, headers=admin)).status_code == 403
        await server.ok("/trajectories/export", {"session_id": "run"}, headers=admin)
        assert (await server.http.get("/rl/sessions/run", headers=admin)).status_code == 200
        assert (await server.http.delete("/rl/sessions/run", headers=admin)).status_code == 200
    lines = lines_with_a_session(caplog)
    assert routes(lines) >= {
        *("/rl/start_session", "/v1/tokenize", "/{session}/rl/set_reward", "/rl/mark", "turn"),
        *("/rl/end_session", "/trajectories/export", "/rl/sessions/{session}", "keys.rotate", "session.delete"),
        *("/v1/chat/completions", "prompt"),
    }, routes(lines)
    assert [line for line in lines if labels(line) != LABELLED] == []
    assert sum(line["event"] == "turn" for line in lines) == 2
    assert sum(line["event"] == "refused" for line in lines) == 3
    assert all("never-shown" not in line for line in lines_of(caplog) + lines_of(caplog, form="json"))
    (turn, *_) = lines_of(caplog, logger="proxy.api.turn_lines")
    assert ' session=run project="gsm 8k" experiment=grpo-1 step=12 sample_index=3 rollout_n=8 validate=false ' in turn


async def test_a_turn_that_breaks_the_server_names_its_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(turns.Commits, "complete", broken)
    async with serving(tmp_path, says("one")) as server:
        await started(server)
        assert (await server.post("/run/v1/chat/completions", {"messages": [user("hi")]})).status_code == 502
    (failed,) = fields_of(caplog, "turn %(interaction)s failed")
    assert (labels(failed), failed["session"]) == (LABELLED, "run")


async def test_a_start_that_is_refused_names_its_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, says()) as server:
        await started(server)
        refused = await server.post("/rl/start_session", {"session_id": "run", "metadata": {**METADATA, "step": 13}})
        assert refused.status_code == 400
    (line,) = fields_of(caplog, "refused")
    assert labels(line) == {**LABELLED, "step": 13}


async def test_a_session_that_expires_names_its_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, says("one"), session_idle_s=0.2) as server:
        await started(server)
        await server.chat([user("hi")], "run")
        await until(lambda: bool(fields_of(caplog, "session expired")))
    (expired,) = fields_of(caplog, "session expired")
    assert expired == {"session": "run", **LABELLED, "turns": 1, "idle_s": 0.2}


async def test_a_session_without_metadata_has_no_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, says("one")) as server:
        await server.chat([user("hi")])
    (turn,) = fields_of(caplog, "turn")
    assert labels(turn) == {}


async def test_the_run_is_known_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, says("one")) as server:
        await started(server)
        await server.chat([user("hi")], "run")
    caplog.clear()
    async with serving(tmp_path, says("two")) as server:
        await server.ok("/run/rl/set_reward", {"reward": 1})
        await server.chat([user("ho")], "run")
        await server.ok("/run/rl/end_session", {})
    lines = lines_with_a_session(caplog)
    assert routes(lines) == {"/{session}/rl/set_reward", "prompt", "turn", "/{session}/rl/end_session"}
    assert all(labels(line) == LABELLED for line in lines)


async def test_the_run_is_known_to_each_worker(
    tmp_path: Path, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with workers_of(tmp_path, postgres_url, migrate=True) as workers:
        await started(workers[0])
        caplog.clear()
        await workers[1].chat([user("hi")], "run")
        await workers[1].ok("/run/rl/end_session", {})
    lines = lines_with_a_session(caplog)
    assert routes(lines) >= {"turn", "/{session}/rl/end_session"}
    assert all(labels(line) == LABELLED for line in lines)


async def test_every_span_of_a_session_says_to_which_run_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr("proxy.app.start_tracing", lambda tell: Tracing(exporter))
    async with serving(tmp_path, says("one")) as server:
        await started(server)
        await server.chat([user("hi")], "run")
        again = {"x-stainless-retry-count": "1"}
        await server.ok("/run/v1/chat/completions", {"model": "m", "messages": [user("hi")]}, headers=again)
        await server.ok("/run/rl/end_session", {})
        assert (await server.post("/run/v1/chat/completions", {"messages": [user("hi")]})).status_code == 403
    spans = [(span.name, dict(span.attributes or {})) for span in exporter.get_finished_spans()]
    assert {name for name, _ in spans} >= {"match", "render", "queue", "generate", "commit"}
    assert sum(name.startswith("POST") for name, _ in spans) == 3  # a turn, a replayed retry, a refusal
    expected = {f"tokengrove.{name}": value for name, value in LABELLED.items()}
    for name, attributes in spans:
        assert expected.items() <= attributes.items(), name
        assert not any("never-shown" in str(value) for value in attributes.values())


def test_labels_are_bounded_scalars() -> None:
    metadata = {"step": 2**70, "project": "p" * 500, "experiment": ["a"], "sample_index": None, "rollout_n": {"n": 1}}
    assert labels_of({**metadata, "validate": True, "other": 1}) == {
        "step": str(2**70),
        "project": "p" * 100 + "...",
        "validate": True,
    }
    assert labels_of({"project": "sk-" + "a" * 40}) == {"project": "..."}
    assert labels_of({"step": 0, "sample_index": 0.5}) == {"step": 0, "sample_index": 0.5}
    assert labels_of({}) == {}


FILTERS: list[tuple[Any, list[str]]] = [
    ({"step": 1}, ["s1-0", "s1-1"]),
    ({"step": [1, 3]}, ["s1-0", "s1-1", "s3-0", "s3-1"]),
    ({"step": {"min": 2}}, ["s2-0", "s2-1", "s3-0", "s3-1"]),
    ({"step": {"max": 1}, "sample_index": 0}, ["s1-0"]),
    ({"sample_index": {"min": 1, "max": 1}, "step": [2]}, ["s2-1"]),
    ({"rollout_n": 2, "step": {"min": 3}}, ["s3-0", "s3-1"]),
    ({"rollout_n": [4]}, []),
    ({"rollout_n": {"min": 1, "max": 2}, "step": 1}, ["s1-0", "s1-1"]),
    ({"project": "gsm", "step": 2}, ["s2-0", "s2-1"]),
    ({"project": ["gsm", "math"], "step": 2}, ["s2-0", "s2-1"]),
    ({"project": "math"}, []),
    ({"experiment": "e-1", "step": {"max": 2}}, ["s1-0", "s1-1", "s2-0", "s2-1"]),
    ({"experiment": ["e-2"]}, []),
    ({"validate": True}, ["v"]),
    ({"validate": [True, False], "step": 1}, ["s1-0", "s1-1", "v"]),
    ({"validate": False, "step": 1}, ["s1-0", "s1-1"]),
]


async def test_exports_claims_and_listings_filter_by_each_label(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, lambda _: Reply(sampled("x")), database_url=database_url) as server:
        run = {"project": "gsm", "experiment": "e-1", "rollout_n": 2}
        names = {
            f"s{step}-{at}": {"step": step, "sample_index": at, "validate": False}
            for step in (1, 2, 3)
            for at in (0, 1)
        }
        for name, own in {**names, "v": {"step": 1, "validate": True}}.items():
            await server.ok("/rl/start_session", {"session_id": name, "metadata": {**run, **own}})
            await server.chat([user("hi")], name)
            await server.ok(f"/{name}/rl/end_session", {})
        for number, (metadata, chosen) in enumerate(FILTERS):
            body = {"filter": {"metadata": metadata}}
            assert list(entries(await server.ok("/trajectories/export", body))) == chosen, metadata
            claim = {**body, "limit": 100, "claim_id": f"c{number}"}
            assert sorted(entries(await server.ok("/trajectories/claim", claim))) == chosen, metadata
            await server.ok("/trajectories/claim", {**claim, "lease_s": 0, "renew": True})
            skip = {} if "validate" in metadata else {"validation": "skip"}
            assert await listed(server, {"metadata": metadata, **skip}) == chosen, metadata
        assert await listed(server, {"metadata": {"step": 1}}) == ["s1-0", "s1-1", "v"]
        assert await listed(server, {"metadata": {"step": 1}, "status": "active"}) == []


async def listed(server: Server, filter: dict[str, Any]) -> list[str]:
    """The sessions that `filter` selects, in pages of two."""
    names: list[str] = []
    params = {"filter": json.dumps(filter), "limit": "2"}
    while True:
        response = await server.http.get("/rl/sessions", params=params)
        assert response.status_code == 200, response.text
        page = response.json()
        names += [entry["session_id"] for entry in page["sessions"]]
        if page["cursor"] is None:
            return names
        params["cursor"] = page["cursor"]


@pytest.mark.parametrize(
    ("filter", "param"),
    [
        ("step=1", "filter"),
        ("[]", "filter"),
        ('{"stepp": 1}', "filter.stepp"),
        ('{"metadata": 1}', "filter.metadata"),
        ('{"metadata": {"step": {}}}', "filter.metadata.step"),
        ('{"agent": "main"}', "filter.agent"),
        ('{"status": "asleep"}', "filter.status"),
    ],
)
async def test_errors_of_a_filter_of_the_listing_name_the_field(tmp_path: Path, filter: str, param: str) -> None:
    async with serving(tmp_path, says()) as server:
        refused = await server.http.get("/rl/sessions", params={"filter": filter})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
