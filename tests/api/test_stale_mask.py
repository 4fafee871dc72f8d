"""`stale: mask` over HTTP and by the client: old tokens are masked in every format, and samples are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_export import always
from tests.exports import areal_tensor, entries, read
from tests.support import Server, sampled, serving, user
from tokengrove.client import AsyncClient

FORMATS = ("json", "jsonl", "npz", "safetensors", "arrow", "parquet")
LAYOUTS: list[dict[str, Any]] = [
    {"layout": "individual"},
    {"layout": "concat"},
    {"layout": "tree"},
    {"layout": "padded", "prompt_length": 64, "response_length": 128},
]
MASK: dict[str, Any] = {"stale": "mask", "filter": {"min_version": 5}}
LENGTH = len(sampled("ok"))


async def sessions(server: Server) -> None:
    """Session `s` has a turn of version 0 and one of version 5 that continues it; session `old` has one of version 0.
    Both have ended."""
    await server.chat([user("hello")], "old")
    answer = await server.answer([user("one")])
    await server.ok("/engine/update_weights", {"path": "anywhere", "version": 5})
    await server.answer([user("one"), answer, user("two")])
    for name in ("s", "old"):
        await server.ok(f"/{name}/rl/end_session", {"reward": 1.0})


def trained(answer: Any) -> dict[str, list[int]]:
    """The versions of the tokens that each session's samples train."""
    found: dict[str, list[int]] = {name: [] for name in sorted(entries(answer))}
    for row in answer["samples"]:
        for version, mask in zip(row["versions"], row["loss_mask"], strict=True):
            assert mask or version == -1
            found[row["session_id"]] += [version] if mask else []
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["layout"])
async def test_every_format_has_the_samples_with_their_old_tokens_masked(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    async with serving(tmp_path, always()) as server:
        await sessions(server)
        whole = await server.ok("/export_trajectories", layout)
        assert trained(whole) == {"old": [0] * LENGTH, "s": [*[0] * LENGTH, *[5] * LENGTH]}
        for name in FORMATS:
            response = await server.post("/export_trajectories", {**layout, **MASK, "format": name})
            assert response.status_code == 200, response.text
            answer = read(name, response.content)
            assert trained(answer) == {"old": [], "s": [5] * LENGTH}, name
            for label in ("interaction_ids", "input_ids", "rewards", "turns"):
                assert [row[label] for row in answer["samples"]] == [row[label] for row in whole["samples"]]
            assert {name: entry["untrained_tokens"] for name, entry in entries(answer).items()} == {
                "s": {"stale": LENGTH},
                "old": {"stale": LENGTH},
            }


async def test_the_default_is_drop_byte_for_byte(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await sessions(server)
        for layout in LAYOUTS:
            for limits in ({}, {"filter": {"min_version": 5}}, {"filter": {"max_version_span": 0}}):
                plain = await server.post("/export_trajectories", {**layout, **limits})
                told = await server.post("/export_trajectories", {**layout, **limits, "stale": "drop"})
                assert (plain.status_code, plain.content) == (200, told.content)
        dropped = await server.ok("/export_trajectories", {"filter": {"min_version": 5}})
        assert dropped["samples"] == []
        assert {name: entry["stale_samples"] for name, entry in entries(dropped).items()} == {"s": 1, "old": 1}


@pytest.mark.parametrize("style", ["individual", "concat"])
async def test_areals_format_has_the_mask(tmp_path: Path, style: str) -> None:
    async with serving(tmp_path, always()) as server:
        await sessions(server)
        answer = await server.ok("/export_trajectories", {"session_id": "s", "style": style, **MASK})
        found = [each["tensor_dict"] for each in answer["interactions"].values()]
        masks = [areal_tensor(each["loss_mask"])[0] for each in found]
        assert [int(mask.sum()) for mask in masks] == ([0, LENGTH] if style == "individual" else [LENGTH])


async def test_a_claim_masks_and_the_client_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server, AsyncClient(app=server.app) as client:
        await sessions(server)
        claim = await client.claim(limit=2, filter={"min_version": 5}, export={"stale": "mask", "format": "npz"})
        assert claim.export is not None and {*claim.sessions} == {"s", "old"}
        for export in (claim.export, await client.export(filter={"min_version": 5}, stale="mask")):
            assert {sample.session_id: int(sample.loss_mask.sum()) for sample in export.samples} == {
                "s": LENGTH,
                "old": 0,
            }
            assert export.untrained_tokens == {"stale": 2 * LENGTH}
        outline = await client.outline("s", filter={"min_version": 5}, stale="mask")
        assert [run[2] for run in outline["samples"][0]["runs"]] == ["prompt", "sampled", "context", "trained"]


async def test_a_claim_without_an_oldest_version_is_refused_and_leases_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await sessions(server)
        for body, param in (
            ({"export": {"stale": "mask"}}, "stale"),
            ({"export": {"stale": "mask"}, "filter": {"max_version_span": 1}}, "stale"),
            ({"stale": "mask", "filter": {"min_version": 5}}, "stale"),
        ):
            refused = await server.post("/trajectories/claim", body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, param), error
        assert "'filter.min_version'" in (await server.post("/trajectories/claim", {"export": {"stale": "mask"}})).text
        claimed = await server.ok("/trajectories/claim", {"limit": 9})
        assert {*entries(claimed)} == {"s", "old"}


async def test_the_tokens_of_a_turn_are_shown_as_stale(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await sessions(server)
        query = {"include": "tokens", "stale": "mask", "filter": json.dumps(MASK["filter"])}
        shown = (await server.http.get("/rl/sessions/s/interactions/1", params=query)).json()["tokens"]
        states = [run["state"] for run in shown["states"]]
        assert states == ["context", "stale", "context", "trained"]
        refused = await server.http.get("/rl/sessions/s/interactions/1", params={"include": "tokens", "stale": "mask"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stale")
