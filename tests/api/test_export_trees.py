"""Exports of whole conversations, worked out by hand: forks, rewrites and shared tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import assistant, says, serving, user


async def test_four_turns_of_two_leaves_are_four_samples_or_two(tmp_path: Path) -> None:
    """i1 [A]->B; i2 [A,B,C]->D; i3 [A]->E; i4 [A,B,C,D,F]->G."""
    async with serving(tmp_path, says("B", "D", "E", "G")) as server:
        asked = [user("A")], [user("A"), assistant("B"), user("C")], [user("A")]
        asked += ([*asked[1], assistant("D"), user("F")],)
        ids = [(await server.chat(messages))["id"] for messages in asked]
        parents = {node["id"]: node["parent_id"] for node in await server.tree()}
        assert [parents[name] for name in ids] == [None, ids[0], None, ids[1]]
        assert [s["interaction_id"] for s in await server.export(layout="individual")] == ids
        joined = await server.export(layout="concat")
        assert [s["interaction_ids"] for s in joined] == [[ids[2]], [ids[0], ids[1], ids[3]]]


async def test_an_answer_echoed_in_part_is_a_rewrite(tmp_path: Path) -> None:
    async with serving(tmp_path, says("think: 123, response: B", "D")) as server:
        await server.chat([user("A")])
        await server.chat([user("A"), assistant("B"), user("C")])
        first, second = await server.tree()
        assert (first["parent_id"], second["parent_id"]) == (None, None)
        assert [len(s["interaction_ids"]) for s in await server.export(layout="concat")] == [1, 1]


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
