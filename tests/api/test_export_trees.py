"""Golden conversations through the server: the parents of their turns, and the samples of each layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import golden
from tests.support import assistant, says, serving, user


@pytest.mark.parametrize("case", golden.load("conversations"))
async def test_parents_and_samples_are_the_golden_ones(tmp_path: Path, case: dict[str, Any]) -> None:
    async with serving(tmp_path, says(*(turn["says"] for turn in case["turns"]))) as server:
        ids = []
        for turn in case["turns"]:
            speakers = [(user, assistant)[number % 2] for number in range(len(turn["messages"]))]
            messages = [speaker(text) for speaker, text in zip(speakers, turn["messages"], strict=True)]
            ids.append((await server.chat(messages))["id"])
        number = {name: at for at, name in enumerate(ids)}
        parents = {node["id"]: node["parent_id"] for node in await server.tree()}
        assert [number.get(parents[name]) for name in ids] == case["parents"]
        for layout in ("individual", "concat"):
            samples = await server.export(layout=layout)
            found = [sample.get("interaction_ids") or [sample["interaction_id"]] for sample in samples]
            assert [[number[name] for name in names] for names in found] == case[layout]


async def test_shared_tokens_are_trained_with_the_selected_leaf_of_lowest_seq(tmp_path: Path) -> None:
    """root -> a -> {a1, a2}."""
    async with serving(tmp_path, says("root", "a", "a1", "a2")) as server:
        messages: list[Any] = []
        for agents in (("shared",), ("shared",), ("one", "shared")):
            messages.append(user("next"))
            for agent in agents:
                body, headers = {"model": "m", "messages": messages}, {"x-tokengrove-agent": agent}
                reply = await server.ok("/s/v1/chat/completions", body, headers=headers)
            messages.append(reply["choices"][0]["message"])
        both = await server.export(layout="concat")
        assert [node["reason"] for node in await server.tree()][2:] == ["continued", "resampled"]
        assert [trained_turns(sample) for sample in both] == [[0, 1, 2], [2]]
        (kept,) = await server.export(layout="concat", filter={"agent": "shared"})
        assert kept["interaction_id"] == both[1]["interaction_id"]
        assert trained_turns(kept) == [0, 1, 2]


def trained_turns(sample: Any) -> list[int]:
    return sorted({turn for turn, on in zip(sample["turn_ids"], sample["loss_mask"], strict=True) if on})
