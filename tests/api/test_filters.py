"""Exports and claims choose sessions by metadata, metrics and rewards, and leave validation sessions out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.exports import entries
from tests.support import Server, says, serving, user
from tokengrove.client.readers.read import READERS, read_page

# Numbers that have several forms, characters with escapes, and a key within a value.
ODD: dict[str, Any] = {
    **{"zero": -0.0, "large": 1e16, "tiny": 1e-7, '"é': "\n/é", "in": {"of": 5}, "of": 3},
}
# By session: metadata at its start, the body of its end.
SESSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a": ({"env": "sokoban", "level": 1}, {"reward": 1, "metrics": {"pass_rate": 1.0}}),
    "b": ({"env": "sokoban", "level": 2}, {"reward": 0, "metrics": {"pass_rate": 0.5, "won": True}}),
    "c": ({"env": "frozen lake", "level": 1.0, "text": "x" * 9000}, {"metrics": {"pass_rate": 0}}),
    "d": ({}, {"metrics": {"pass_rate": "none"}}),
    "v": ({"env": "sokoban", "validate": True}, {"reward": 1, "metrics": {"pass_rate": 0.75}}),
    "w": ({"env": "sokoban", "validate": "no", **ODD}, {"step_scores": [0]}),
}
TRAINED = ["a", "b", "c", "d", "w"]
CHOICES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, TRAINED),
    ({"metadata": {"env": "sokoban"}}, ["a", "b", "w"]),
    ({"metadata": {"env": ["frozen lake", "maze"]}}, ["c"]),
    ({"metadata": {"env": "sokoban", "level": 2}}, ["b"]),
    ({"metadata": {"level": 1}}, ["a", "c"]),
    ({"metadata": {"level": 1.0}}, ["a", "c"]),
    ({"metadata": {"level": [2, "1"]}}, ["b"]),
    ({"metadata": {"zero": 0}}, ["w"]),
    ({"metadata": {"zero": {"max": 0}}}, ["w"]),
    ({"metadata": {"of": {"max": 3}}}, ["w"]),
    ({"metadata": {"large": 10**16}}, ["w"]),
    ({"metadata": {"tiny": 1e-7}}, ["w"]),
    ({"metadata": {'"é': "\n/é"}}, ["w"]),
    ({"metadata": {"level": True}}, []),
    ({"metadata": {"env": None}}, ["d"]),
    ({"metadata": {"level": {"min": 1.5}}}, ["b"]),
    ({"metrics": {"pass_rate": 1}}, ["a"]),
    ({"metrics": {"pass_rate": {"min": 0.5}}}, ["a", "b"]),
    ({"metrics": {"pass_rate": {"min": 0, "max": 0.5}}}, ["b", "c"]),
    ({"metrics": {"won": True}}, ["b"]),
    ({"metrics": {"won": 1}}, []),
    ({"metadata": {"env": "sokoban"}, "metrics": {"pass_rate": {"max": 0.9}}}, ["b"]),
    ({"rewarded": True}, ["a", "b", "w"]),
    ({"rewarded": False}, ["c", "d"]),
    ({"rewarded": False, "metrics": {"pass_rate": 0}}, ["c"]),
    ({"validation": "skip"}, TRAINED),
    ({"validation": "include"}, sorted(SESSIONS)),
    ({"validation": "only"}, ["v"]),
    ({"metadata": {"validate": True}}, ["v"]),
    ({"validation": "include", "metrics": {"pass_rate": {"min": 0.75}}}, ["a", "v"]),
]


async def recorded(server: Server) -> None:
    for name in sorted(SESSIONS):
        metadata, end = SESSIONS[name]
        await server.ok("/rl/start_session", {"session_id": name, "metadata": metadata})
        await server.chat([user("hi")], name)
        await server.ok(f"/{name}/rl/end_session", end)


async def exported(server: Server, filters: dict[str, Any], **more: Any) -> list[str]:
    return list(entries(await server.ok("/export_trajectories", {"filter": filters, **more})))


async def test_exports_and_claims_choose_the_same_sessions(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*SESSIONS), database_url=database_url) as server:
        await recorded(server)
        for number, (filters, chosen) in enumerate(CHOICES):
            assert await exported(server, filters) == chosen, filters
            claim = {"filter": filters, "limit": 100, "claim_id": f"c{number}"}
            assert list(entries(await server.ok("/trajectories/claim", claim))) == chosen, filters
            await server.ok("/trajectories/claim", {**claim, "lease_s": 0, "renew": True})


async def test_pages_of_a_filter_on_values_have_the_size_that_was_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*SESSIONS)) as server:
        await recorded(server)
        body: dict[str, Any] = {"filter": {"metadata": {"env": "sokoban"}}, "limit": 2}
        first = await server.ok("/export_trajectories", body)
        assert (list(entries(first)), first["cursor"]) == (["a", "b"], "b")
        second = await server.ok("/export_trajectories", {**body, "cursor": first["cursor"]})
        assert (list(entries(second)), second["cursor"]) == (["w"], None)


async def test_an_export_says_how_many_validation_sessions_it_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*SESSIONS)) as server:
        await recorded(server)
        for filters, number in (({}, 1), ({"metadata": {"env": "sokoban"}}, 1), ({"metadata": {"level": 1}}, 0)):
            response = await server.post("/export_trajectories", {"filter": filters, "limit": 1})
            assert response.json().get("left_out", {"validation": 0}) == {"validation": number}
            assert response.headers.get("x-tokengrove-left-out", "0") == str(number)
        for name in READERS:
            response = await server.post("/export_trajectories", {"format": name})
            assert read_page(response.content, name).end["left_out"] == {"validation": 1}, name
        later = await server.post("/export_trajectories", {"limit": 1, "cursor": "a"})
        asked = await server.post("/export_trajectories", {"filter": {"validation": "include"}})
        assert "left_out" not in later.json() and "left_out" not in asked.json()


async def test_a_validation_session_that_is_named_is_exported(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*SESSIONS)) as server:
        await recorded(server)
        assert len(await server.export("v")) == 1
        body = {"session_ids": ["a", "v"], "filter": {"validation": "skip"}}
        assert list(entries(await server.ok("/export_trajectories", body))) == ["a"]


async def test_a_claim_does_not_wait_for_validation_sessions_in_front(tmp_path: Path) -> None:
    async with serving(tmp_path, says("v", "a")) as server:
        for name, metadata in (("v", {"validate": True}), ("a", {})):
            await server.ok("/rl/start_session", {"session_id": name, "metadata": metadata})
            await server.chat([user("hi")], name)
            await server.ok(f"/{name}/rl/end_session", {})
        assert list(entries(await server.ok("/trajectories/claim", {}))) == ["a"]
        assert list(entries(await server.ok("/trajectories/claim", {}))) == []


@pytest.mark.parametrize(
    ("filters", "param"),
    [
        ({"metadata": "env"}, "filter.metadata"),
        ({"metrics": [1]}, "filter.metrics"),
        ({"metrics": {"pass_rate": {}}}, "filter.metrics.pass_rate"),
        ({"metrics": {"pass_rate": {"least": 1}}}, "filter.metrics.pass_rate.least"),
        ({"metrics": {"pass_rate": {"min": "1"}}}, "filter.metrics.pass_rate.min"),
        ({"rewarded": "yes"}, "filter.rewarded"),
        ({"validation": True}, "filter.validation"),
        ({"validation": "none"}, "filter.validation"),
    ],
)
async def test_a_wrong_filter_is_400_and_names_the_field(tmp_path: Path, filters: dict[str, Any], param: str) -> None:
    async with serving(tmp_path, says()) as server:
        for path in ("/export_trajectories", "/trajectories/claim"):
            response = await server.post(path, {"filter": filters})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
        outside = await server.post("/export_trajectories", filters)
        assert outside.status_code == 400
