"""POST /trajectories/export with `outline`: what samples contain, without a number for each token."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support import Server, assistant, says, serving, user
from tokengrove.client import AsyncClient

PADDED = {"layout": "padded", "prompt_length": 40, "response_length": 60, "on_too_long": "truncate"}


async def forked(server: Server) -> None:
    """Two turns, a fork from the first, and a root of another agent; the second turn is not trained."""
    first = await server.answer([user("one")])
    await server.answer([user("one"), first, user("two")])
    await server.answer([user("one"), first, user("three")])
    await server.answer([user("one"), assistant("changed"), user("four")])
    await server.ok("/s/rl/mark", {"turn": 1, "trainable": False})
    await server.ok("/s/rl/set_reward", {"reward": 1.0})


@pytest.mark.parametrize("options", [{"layout": "concat"}, {"layout": "individual"}, {"layout": "tree"}, PADDED])
async def test_runs_say_of_each_token_what_the_arrays_do(tmp_path: Path, options: dict[str, Any]) -> None:
    async with serving(tmp_path, says("an answer", "more", "other", "last")) as server:
        await forked(server)
        whole = await server.ok("/trajectories/export", {"session_id": "s", **options})
        outlined = await server.ok("/trajectories/export", {"session_id": "s", "outline": True, **options})
    assert len(outlined["samples"]) == len(whole["samples"]) > 0
    for sample, arrays in zip(outlined["samples"], whole["samples"], strict=True):
        runs = sample["runs"]
        assert (runs[0][0], runs[-1][1]) == (0, sample["tokens"]) == (0, len(arrays["input_ids"]))
        assert all(one[1] == other[0] for one, other in pairwise(runs))
        trained = [at for start, end, kind, _ in runs if kind == "trained" for at in range(start, end)]
        assert trained == [at for at, mask in enumerate(arrays["loss_mask"]) if mask]
        assert [arrays["turn_ids"][at] for at in trained] == [
            turn for start, end, kind, turn in runs if kind == "trained" for _ in range(start, end)
        ]
        missing = {name for name in arrays if name not in sample}
        assert {"input_ids", "loss_mask", "logprobs"} <= missing
        assert all(sample[name] == arrays[name] for name in arrays if name not in missing)


async def test_the_entry_says_of_each_output_why_it_is_not_trained(tmp_path: Path) -> None:
    async with serving(tmp_path, says("an answer", "more", "other", "last")) as server:
        await forked(server)
        outlined = await server.ok("/trajectories/export", {"session_id": "s", "outline": True})
        nodes = await server.tree()
    entry = outlined["sessions"][0]
    assert entry["untrained_tokens"] == {"mark": nodes[1]["output_tokens"]}
    assert entry["output_runs"] == {
        node["id"]: [[0, node["output_tokens"], "mark" if node["turn"] == 1 else None]] for node in nodes
    }


async def test_jsonl_has_an_outline_too_and_no_other_format(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello")) as server:
        await server.chat([user("hi")])
        lines = await server.post("/trajectories/export", {"session_id": "s", "outline": True, "format": "jsonl"})
        assert '"runs"' in lines.text.splitlines()[0]
        for body in ({"format": "npz", "outline": True}, {"outline": "yes"}):
            refused = await server.post("/trajectories/export", {"session_id": "s", **body})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "outline")


async def test_the_client_returns_the_outline_of_a_session(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello")) as server:
        await server.chat([user("hi")])
        async with AsyncClient(app=server.app) as client:
            outlined = await client.outline("s", layout="individual", filter={"purpose": "main"})
    [sample] = outlined["samples"]
    assert [kind for _, _, kind, _ in sample["runs"]] == ["prompt", "trained"]
