"""What the bench of side columns measures: the bytes of a token, and turns of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.columns import (
    BOTH,
    EXPERTS_ONLY,
    MASK,
    NONE,
    ROW_BYTES,
    TURN_TOKENS,
    TURNS,
    Talk,
    app,
    fill,
    stored_bytes,
)
from tests.bench.export import BINARY

MOST = 1.05
RECORDED = ("kept", "kept_logprobs", "routed_experts")
TOKENS = TURNS * TURN_TOKENS


async def test_a_token_takes_hardly_more_than_its_experts_in_the_store_and_in_binary_formats(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    sizes: dict[str, dict[str, int]] = {}
    for name, replay in (("with", EXPERTS_ONLY), ("without", NONE)):
        folder = tmp_path_factory.mktemp(name)
        url = f"sqlite:///{folder / 'bench.db'}"
        assert await fill(url, 1, replay) == TOKENS
        sizes[name] = {"store": stored_bytes(url)}
        async with app(folder, replay, 8, dense=False) as client:
            for each in BINARY:
                answer = await client.post(
                    "/trajectories/export", json={"session_id": "session-000", "layout": "concat", "format": each}
                )
                assert answer.status_code == 200, answer.text
                sizes[name][each] = len(answer.content)
    per_token = {kind: (size - sizes["without"][kind]) / TOKENS for kind, size in sizes["with"].items()}
    assert {kind: size for kind, size in per_token.items() if not ROW_BYTES * 0.9 < size <= ROW_BYTES * MOST} == {}


async def told(folder: Path, replay: tuple[str, ...], *, dense: bool) -> Any:
    """The label `replay` of a session of two turns, and the notes of its turns."""
    async with app(folder, replay, 40, dense=dense, piece=7) as client:
        talk = Talk(client, "s", 40)
        await talk.turn("one")
        await talk.turn("two")
        body = {"session_id": "s", "layout": "concat", "replay": ["kept", "experts"]}
        [sample] = (await client.post("/trajectories/export", json=body)).json()["samples"]
        turns = (await client.get("/rl/sessions/s")).json()["interactions"]
    return sample["replay"], [turn["notes"]["replay"] for turn in turns]


async def test_the_engine_of_the_bench_reports_every_row(tmp_path: Path) -> None:
    label, notes = await told(tmp_path, BOTH, dense=False)
    assert {name: each["missing"] for name, each in label.items()} == {name: [] for name in RECORDED}
    assert notes == [dict.fromkeys(RECORDED, 0)] * 2


@pytest.mark.parametrize("replay", [MASK, BOTH])
async def test_a_dense_model_records_its_kept_sets_and_nothing_else(tmp_path: Path, replay: tuple[str, ...]) -> None:
    label, notes = await told(tmp_path, replay, dense=True)
    assert set(label) == {"kept", "kept_logprobs"}
    assert notes == [{"kept": 0, "kept_logprobs": 0}] * 2
