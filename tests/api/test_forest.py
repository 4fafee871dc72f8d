"""Layout forest over HTTP: in each format the same sequences, and the samples of layout concat in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.engine.scripted.scripts import Script
from tests.support import Server, assistant, says, serving, system, user
from tokengrove.client import AsyncClient
from tokengrove.client.forest import PackedSequence
from tokengrove.errors import InvalidRequest, UnsupportedParameter

FORMATS = ("json", "jsonl", "npz", "safetensors", "arrow", "parquet")
ALONE = "ignore:session alone. its group has no other score"
PROMPT = [system("You are one of several agents that share a long prompt. " * 5), user("hello")]


async def play(server: Server, session: str, group: str | None, score: float) -> None:
    """Two turns, and a fork of the second."""
    await server.ok("/rl/start_session", {"session_id": session, **({"group_id": group} if group else {})})
    first = await server.answer(PROMPT, session)
    await server.chat([*PROMPT, first, user("go on")], session)
    await server.chat([*PROMPT, first, user("go elsewhere")], session)
    await server.ok(f"/{session}/rl/set_reward", {"reward": score})
    await server.ok(f"/{session}/rl/end_session", {})


async def played(server: Server) -> None:
    for at in range(4):
        await play(server, f"a{at}", "a", float(at))
    await play(server, "alone", None, 1.0)


def answers() -> Script:
    return says(*(["the same words"] * 15))


def facts(sequence: PackedSequence) -> dict[str, Any]:
    named = [name for name in PackedSequence.__dataclass_fields__ if name not in ("image_table", "extra")]
    return {**{name: getattr(sequence, name) for name in named}, **sequence.extra}


@pytest.mark.filterwarnings(ALONE)
@pytest.mark.parametrize("format", FORMATS)
async def test_the_sequences_are_the_same_in_each_format(tmp_path: Path, format: Any) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await played(server)
        plain = await client.export(layout="forest", format="json", advantages="grpo")
        found = await client.export(layout="forest", format=format, advantages="grpo")
        assert found.samples == [] and len(found.sequences) == 2
        assert found.forest == plain.forest and found.sessions.keys() == plain.sessions.keys()
        for one, other in zip(found.sequences, plain.sequences, strict=True):
            first, second = facts(one), facts(other)
            assert first.keys() == second.keys()
            for name, value in first.items():
                np.testing.assert_array_equal(value, second[name], err_msg=name)
                assert getattr(value, "dtype", None) == getattr(second[name], "dtype", None), name


@pytest.mark.filterwarnings(ALONE)
async def test_the_samples_of_a_group_share_their_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await played(server)
        rows = await client.export(advantages="grpo")
        found = await client.export(layout="forest", advantages="grpo")
        by_id = {each.interaction_id: each for sequence in found.sequences for each in sequence.samples()}
        assert by_id.keys() == {each.interaction_id for each in rows.samples}
        for sample in rows.samples:
            made = by_id[sample.interaction_id]
            assert (made.advantage, made.reward, made.weight) == (sample.advantage, sample.reward, sample.weight)
            for name in ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids"):
                np.testing.assert_array_equal(getattr(made, name), getattr(sample, name))
            assert [turn["span"] for turn in made.turns] == [turn["span"] for turn in sample.turns]
        prompt = rows.samples[0].turns[0]["span"][0]
        group, alone = found.sequences
        assert group.group_ids == ("a",) and len(group.rows) == 8
        assert group.row_tokens - len(group) >= 7 * prompt
        assert found.forest["row_tokens"] == sum(len(each.input_ids) for each in rows.samples)
        assert found.forest["tokens"] == len(group) + len(alone)
        assert found.forest["unmerged_tokens"]["sampled"] > 0, "the answers are equal, and each is trained"
        assert all(entry["trained_tokens"] for entry in found.sessions.values())


async def test_pages_have_whole_counts_and_all_sessions(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await played(server)
        whole = await client.export(layout="forest")
        paged = await client.export(layout="forest", limit=2)
        assert paged.sessions.keys() == whole.sessions.keys()
        assert paged.forest["rows"] == whole.forest["rows"]
        assert paged.forest["row_tokens"] == whole.forest["row_tokens"]
        assert paged.forest["tokens"] == sum(map(len, paged.sequences)) > whole.forest["tokens"]


async def test_sessions_merge_across_groups_if_asked(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await played(server)
        (one,) = (await client.export(layout="forest", merge="all")).sequences
        assert one.group_ids == ("a", None) and (one.parent == -1).sum() == 1


@pytest.mark.filterwarnings("ignore:.*too_long")
async def test_a_sample_that_fits_no_sequence_is_refused_or_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await played(server)
        with pytest.raises(InvalidRequest, match="has samples of more than 'max_tokens' tokens: 2") as caught:
            await client.export(layout="forest", max_tokens=20)
        assert caught.value.param == "max_tokens"
        dropped = await client.export(layout="forest", max_tokens=20, on_too_long="drop")
        assert dropped.sequences == [] and dropped.forest["sequences"] == 0
        assert dropped.untrained_tokens.keys() == {"too_long"}
        assert {entry["dropped_samples"] for entry in dropped.sessions.values()} == {2}
        longest = max(len(each.input_ids) for each in (await client.export()).samples)
        divided = await client.export(layout="forest", max_tokens=longest)
        assert max(map(len, divided.sequences)) <= longest and divided.forest["repeated_tokens"] > 0
        assert sum(int(each.loss_mask.sum()) for each in divided.sequences) == sum(
            entry["trained_tokens"] for entry in divided.sessions.values()
        )


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 100}, "max_tokens"),
        ({"layout": "tree", "merge": "all"}, "merge"),
        ({"layout": "forest", "on_too_long": "truncate", "max_tokens": 9}, "on_too_long"),
        ({"layout": "forest", "on_too_long": "drop"}, "on_too_long"),
        ({"layout": "forest", "prompt_length": 9}, "prompt_length"),
        ({"layout": "forest", "max_tokens": 0}, "max_tokens"),
        ({"layout": "forest", "experts": "last"}, "experts"),
        ({"layout": "forest", "experts": "equal"}, "experts"),
        ({"layout": "forest", "experts": "first", "replay": ["kept"]}, "experts"),
    ],
)
async def test_options_that_do_not_apply_are_refused(tmp_path: Path, options: Any, param: str) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.export(**options)
        assert caught.value.param == param
        with pytest.raises(UnsupportedParameter):
            await client.export(layout="forest", format="areal")


async def test_what_needs_samples_names_the_way_to_them(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await play(server, "a", "a", 1.0)
        found = await client.export(layout="forest")
        with pytest.raises(InvalidRequest, match=r"samples\(\)"):
            found.to_tensor_dict()
        values = np.arange(len(found.sequences[0]), dtype=np.float32)
        with pytest.raises(InvalidRequest, match=r"samples\(\)"):
            await client.annotate(found.sequences, 1, {"index": [values]})  # type: ignore[arg-type]
        (sequence,) = found.sequences
        rows = [values[sequence.path(row)] for row in range(len(sequence.rows))]
        assert await client.annotate(sequence.samples(), 1, {"index": rows}) == 3


async def test_a_claim_has_its_groups_as_sequences(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await played(server)
        claim = await client.claim(group_size=4, limit=4, export={"layout": "forest", "format": "npz"})
        assert claim.export is not None and len(claim.export.sequences) == 1
        assert len(claim.sessions) == 4 and claim.export.forest["rows"] == 8


async def test_an_outline_has_the_runs_of_each_sample(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server:
        await played(server)
        answer = await server.ok("/trajectories/export", {"layout": "forest", "outline": True})
        for each in answer["samples"]:
            runs = each["runs"]
            assert [run[0] for run in runs[1:]] == [run[1] for run in runs[:-1]]
            assert (runs[0][0], runs[-1][1]) == (0, each["tokens"])
            assert {row for _, _, kind, row in runs if kind == "trained"} <= set(range(len(each["rows"])))
            assert "input_ids" not in each
        assert answer["forest"]["merged_tokens"] > 0


async def test_the_messages_of_each_sample_are_included(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await play(server, "a", "a", 1.0)
        (one,) = (await client.export(layout="forest", include=["messages"])).sequences
        assert [row["turns"][0]["messages"][-1] for row in one.rows] == [assistant("the same words")] * 2


async def test_the_sessions_of_a_group_are_packed_together_wherever_they_are_on_the_page(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        for name, group in (("a0", "a"), ("b0", "b"), ("a1", "a"), ("b1", "b")):
            await play(server, name, group, 1.0)
        found = await client.export(layout="forest")
        assert [each.group_ids for each in found.sequences] == [("a",), ("b",)]
        assert found.sessions.keys() == {"a0", "b0", "a1", "b1"}


async def test_advantages_of_turns_compare_the_rewards_of_the_group(tmp_path: Path) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        for at in range(3):
            await play(server, f"a{at}", "a", float(at))
        for layout in ("concat", "forest"):
            found = await client.export(layout=layout, turn_advantages="process", discount=1.0)
            samples = found.samples or [each for sequence in found.sequences for each in sequence.samples()]
            last = {
                each.session_id: each.extra["turn_advantages"][-1]
                for each in samples
                if each.turns[-1]["reward"] is not None
            }
            assert last == pytest.approx({"a0": -1.0, "a1": 0.0, "a2": 1.0}, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"step_weight": 0.5}, "step_weight"),
        ({"step_weight": 0.5, "turn_advantages": "process"}, "step_weight"),
        ({"turn_advantages": "gigpo", "format": "areal", "layout": "individual"}, "turn_advantages"),
    ],
)
async def test_turn_advantages_that_do_not_apply_are_refused(tmp_path: Path, options: Any, param: str) -> None:
    async with serving(tmp_path, answers()) as server, AsyncClient(app=server.app) as client:
        await played(server)
        with pytest.raises((InvalidRequest, UnsupportedParameter)) as caught:
            await client.export(**options)
        assert caught.value.param == param
