"""Export options over HTTP: marks, selection of turns, named rewards, groups across pages, and long samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.api import export_endpoint
from tests.api.test_export import always, chain, export
from tests.api.test_routes import ADMIN, bearer
from tests.exports import entries
from tests.support import sampled, says, serving, user

PADDED = {"layout": "padded", "prompt_length": 64, "response_length": 64}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"layout": "tree", "drift": "mask"}, "drift", "tree"),
    ({"layout": "concat", "style": "individual"}, "style", "layout"),
    ({"layout": "padded"}, "prompt_length", "tokens"),
    ({"layout": "padded", "prompt_length": 5}, "response_length", "tokens"),
    ({**PADDED, "prompt_length": 0}, "prompt_length", "between"),
    ({**PADDED, "on_too_long": "ignore"}, "on_too_long", "truncate"),
    ({**PADDED, "keep": "head"}, "keep", "truncate"),
    ({**PADDED, "on_too_long": "truncate", "keep": "left"}, "keep", "tail"),
    ({**PADDED, "pad_token_id": -1}, "pad_token_id", "at least 0"),
    ({"prompt_length": 5}, "prompt_length", "padded"),
    ({"layout": "concat", "on_too_long": "drop"}, "on_too_long", "padded"),
    ({"format": "areal", "layout": "tree"}, "layout", "areal"),
    ({"style": "padded", "prompt_length": 5, "response_length": 5}, "layout", "areal"),
    ({"style": "concat", "advantages": "grpo"}, "advantages", "areal"),
    ({"format": "safetensors", "include": ["messages"]}, "include", "npz"),
    ({"format": "pickle"}, "format", "parquet"),
    ({"train": []}, "train", "object"),
    ({"train": {"turn": "all"}}, "train.turn", "turns"),
    ({"train": {"turns": [-1]}}, "train.turns", "from 0"),
    ({"train": {"turns": [True]}}, "train.turns", "from 0"),
    ({"train": {"purposes": ["fun"]}}, "train.purposes", "summary"),
    ({"train": {"agents": 5}}, "train.agents", "array"),
    ({"train": {"exclude": [5]}}, "train.exclude", "string"),
    ({"include": {}}, "include", "array"),
    ({"reward_name": 5}, "reward_name", "string"),
    ({"reward_name": ""}, "reward_name", "empty"),
    ({"reward_granularity": "ternary"}, "reward_granularity", "pass_rate"),
    ({"reward_granularity": "binary", "reward_name": "style"}, "reward_name", "pass_rate"),
    ({"mask_unfinished": 1}, "mask_unfinished", "true or false"),
    ({"style": "individual", "drop_retry_orphans": 1}, "drop_retry_orphans", "true or false"),
    ({"advantages": "gae"}, "advantages", "leave_one_out"),
    ({"step_advantages": {}}, "step_advantages", "grpo"),
    ({"filter": {"min_version": -1}}, "filter.min_version", "at least 0"),
    ({"filter": {"max_version_span": "1"}}, "filter.max_version_span", "integer"),
    ({"stale": "mask"}, "stale", "'filter.min_version'"),
    ({"stale": "mask", "filter": {"max_version_span": 1}, "format": "npz"}, "stale", "'filter.min_version'"),
    ({"stale": "keep", "filter": {"min_version": 1}}, "stale", "mask"),
    ({"filter": {"min_version": 1, "stale": "mask"}}, "filter.stale", "min_version"),
]


async def test_a_bad_option_is_400_and_names_the_field_and_the_way_out(tmp_path: Path) -> None:
    wrong = []
    async with serving(tmp_path, always()) as server:
        await chain(server, turns=1)
        for body, param, says_so in BAD:
            response = await server.post("/export_trajectories", body)
            error = response.json().get("error", {})
            if (response.status_code, error.get("param")) != (400, param) or says_so not in error["message"]:
                wrong.append((body, response.text[:500]))
    assert not wrong, wrong


@pytest.mark.parametrize("drop", [False, True, None])
async def test_areals_field_for_retries_changes_nothing(tmp_path: Path, drop: bool | None) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server, turns=2)
        body = {"session_id": "s", "discount": 0.9, "style": "individual"}
        answers = [
            await server.ok("/export_trajectories", {**body, **more}) for more in ({"drop_retry_orphans": drop}, {})
        ]
        assert answers[0] == answers[1]


async def test_a_marked_turn_is_context_until_it_is_unmarked(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        first, second = await chain(server)
        lengths = [len(sampled(text)) for text in ("one", "two")]

        async def trained() -> list[int]:
            (sample,) = await server.export()
            spans = [slice(*turn["span"]) for turn in sample["turns"]]
            return [sum(sample["loss_mask"][span]) for span in spans]

        assert await trained() == lengths
        body = {"interaction_id": first, "trainable": False}
        assert await server.ok("/s/rl/mark", body) == {"interaction_ids": [first]}
        assert await trained() == [0, lengths[1]]
        assert [node["trainable"] for node in await server.tree()] == [False, True]
        await server.ok("/s/rl/mark", {"interaction_id": second, "trainable": True, "spans": [[0, 1]]})
        assert await trained() == [0, 1]
        assert [node["spans"] for node in await server.tree()] == [[], [[0, 1]]]
        for name in (first, second):
            await server.ok("/s/rl/mark", {"interaction_id": name, "trainable": True})
        assert await trained() == lengths


async def test_marks_survive_a_restart_and_the_end_of_the_session(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        (name,) = await chain(server, turns=1)
        await server.ok("/s/rl/end_session", {"reward": 1})
        await server.ok("/s/rl/mark", {"interaction_id": name, "trainable": True, "spans": [[1, 2]]})
    async with serving(tmp_path, says()) as server:
        (sample,) = await server.export()
        begin, end = sample["turns"][0]["span"]
        assert sample["loss_mask"][begin:end] == [0, 1, *[0] * (end - begin - 2)]
        assert sample["rewards"] == [1.0]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"interaction_id": None}, 400, "interaction_id"),
        ({"interaction_id": "chatcmpl-nobody"}, 404, "interaction_id"),
        ({"trainable": None}, 400, "trainable"),
        ({"trainable": 1}, 400, "trainable"),
        ({"spans": [[0, 99]]}, 400, "spans[0]"),
        ({"spans": [[0, 1], [1, 1]]}, 400, "spans[1]"),
        ({"spans": [[-1, 1]]}, 400, "spans[0]"),
        ({"spans": [[0, True]]}, 400, "spans[0]"),
        ({"spans": [[0]]}, 400, "spans[0]"),
        ({"spans": []}, 400, "spans"),
        ({"spans": [[0, 1]], "trainable": False}, 400, "spans"),
    ],
)
async def test_a_bad_mark_changes_nothing(tmp_path: Path, change: dict[str, Any], status: int, param: str) -> None:
    async with serving(tmp_path, says("one")) as server:
        (name,) = await chain(server, turns=1)
        body = {"interaction_id": name, "trainable": True, **change}
        response = await server.post("/s/rl/mark", body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
        assert [(node["trainable"], node["spans"]) for node in await server.tree()] == [(True, [])]


async def test_an_agent_may_mark_its_turns_only_where_it_may_reward_them(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one"), admin_key=ADMIN) as server:
        mine = await server.ok("/rl/start_session", {"task_id": "t", "session_id": "s"}, headers=bearer(ADMIN))
        turn = {"model": "m", "messages": [user("a")]}
        reply = await server.ok("/v1/chat/completions", turn, headers=bearer(mine["api_key"]))
        body = {"interaction_id": reply["id"], "trainable": False}
        refused = await server.post("/rl/mark", body, headers=bearer(mine["api_key"]))
        assert refused.status_code == 403
        await server.ok("/rl/mark", body, headers=bearer(mine["control_key"]))


async def test_train_selects_by_turn_purpose_agent_and_id(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        first, second, third = await chain(server, turns=3)
        for train, kept in (
            ({"turns": "all"}, [0, 1, 2]),
            ({"turns": "last"}, [2]),
            ({"turns": [0, 2]}, [0, 2]),
            ({"purposes": "title"}, []),
            ({"purposes": ["main", "title"]}, [0, 1, 2]),
            ({"agents": ["helper"]}, []),
            ({"exclude": [first, third]}, [1]),
            ({"turns": [1, 2], "exclude": [second]}, [2]),
        ):
            (sample,) = await server.export(train=train)
            assert sorted({turn for turn in sample["turn_ids"] if turn >= 0}) == kept, train
            assert sample["weight"] == [1.0 if kept else 0.0]
            assert sample["interaction_ids"] == [first, second, third]


async def test_the_main_reward_is_chosen_at_export(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        names = await chain(server)
        await server.ok("/s/rl/set_reward", {"reward": 0.5})
        await server.ok("/s/rl/set_reward", {"reward": 0.9, "name": "pass_rate"})
        await server.ok("/s/rl/set_reward", {"reward": 7, "name": "style", "interaction_id": names[0]})
        for options, expected in (
            ({}, 0.5),
            ({"reward_name": "style"}, 7.5),
            ({"reward_name": "unheard of"}, 0.5),
            ({"reward_granularity": "pass_rate"}, 0.9),
            ({"reward_granularity": "binary"}, 0.5),
        ):
            (sample,) = await server.export(**options)
            assert sample["rewards"] == [pytest.approx(expected)], options
        assert [node["reward"] for node in await server.tree()] == [None, 0.5]
        assert sample["turns"][0]["rewards"] == {"style": 7.0}


async def test_rolls_granularities_read_the_metrics_of_the_session_first(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for name, metrics in (("half", {"pass_rate": 0.25}), ("none", {"binary": 0.0})):
            await server.ok("/rl/start_session", {"task_id": "t", "session_id": name, "group_id": "g"})
            await chain(server, name)
            await server.ok(f"/{name}/rl/end_session", {"reward": 1.0, "metrics": metrics})
        for options, expected in (
            ({"reward_granularity": "pass_rate"}, [0.25, 1.0]),
            ({"reward_granularity": "binary"}, [1.0, 0.0]),
            ({"reward_name": "pass_rate"}, [0.25, 1.0]),
            ({}, [1.0, 1.0]),
        ):
            body = {"session_ids": ["half", "none"], "layout": "concat", "advantages": "leave_one_out", **options}
            samples = (await server.ok("/export_trajectories", body))["samples"]
            assert [sample["rewards"][0] for sample in samples] == expected, options
            assert samples[0]["advantages"] == [expected[0] - expected[1]], options


async def test_an_export_says_whether_a_session_is_rewarded(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for name in ("none", "raw", "named"):
            await chain(server, name, turns=1)
        await server.ok("/raw/rl/set_reward", {"reward": 0})
        await server.ok("/named/rl/set_reward", {"reward": 0, "name": "style"})
        body = await export(server)
        rewarded = {name: entry["rewarded"] for name, entry in entries(body).items()}
        assert rewarded == {"none": False, "raw": True, "named": True}
        assert [sample["rewards"] for sample in body["samples"]] == [[0.0]] * 3


async def test_an_unfinished_session_is_masked_on_request(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server)
        await server.ok("/s/rl/end_session", {"finished": False, "reward": 2})
        (kept,), (masked,) = await server.export(), await server.export(mask_unfinished=True)
        assert sum(kept["loss_mask"]) > 0 == sum(masked["loss_mask"])
        assert masked["input_ids"] == kept["input_ids"] and masked["rewards"] == [2.0]
        assert entries(await export(server))["s"]["finished"] is False


async def test_groups_are_whole_across_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_endpoint, "_GROUP_PAGE", 4)  # each group spans several pages of the counting pass
    scores = {"g1": [1.0, 0.0, 0.5, 3.0], "g2": [2.0, -2.0, 0.0, 0.0]}
    async with serving(tmp_path, always()) as server:
        for at in range(4):
            for group, rewards in scores.items():
                name = f"{group}-{at}"
                await server.ok("/rl/start_session", {"session_id": name, "group_id": group})
                await chain(server, name)
                await server.ok(f"/{name}/rl/end_session", {"reward": rewards[at]})
        await server.ok("/rl/start_session", {"session_id": "g1-none", "group_id": "g1"})  # no turn: joins no group
        found: dict[str, dict[str, float]] = {"grpo": {}, "leave_one_out": {}}
        for kind, values in found.items():
            cursor = None
            while True:
                page = await export(server, layout="concat", advantages=kind, limit=3, cursor=cursor)
                values.update({sample["session_id"]: sample["advantages"][0] for sample in page["samples"]})
                cursor = page["cursor"]
                if cursor is None:
                    break
        for group, rewards in scores.items():
            for at, reward in enumerate(rewards):
                others = np.mean(rewards[:at] + rewards[at + 1 :])
                assert found["leave_one_out"][f"{group}-{at}"] == pytest.approx(reward - others)
                expected = (reward - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
                assert found["grpo"][f"{group}-{at}"] == pytest.approx(expected)


async def test_steps_of_one_state_are_compared_by_their_returns(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for name, reward in (("a", 1.0), ("b", 0.0)):
            await server.ok("/rl/start_session", {"session_id": name, "group_id": "g", "discount": 0.5})
            for number, state in enumerate(("start", name)):
                body = {"model": "m", "messages": [user("x")] * (number + 1)}
                headers = {"x-tokengrove-state-hash": state}
                await server.ok(f"/{name}/v1/chat/completions", body, headers=headers)
            await server.ok(f"/{name}/rl/end_session", {"step_scores": [reward, 0]})
        samples = (await export(server, layout="individual", step_advantages="leave_one_out"))["samples"]
        found = {(s["session_id"], s["turns"][0]["state_hash"]): s["step_advantages"] for s in samples}
        assert found == {("a", "start"): [1.0], ("b", "start"): [-1.0], ("a", "a"): [0.0], ("b", "b"): [0.0]}


async def test_a_sample_that_is_too_long_is_refused_dropped_or_truncated(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        await chain(server, "short", turns=1)
        await chain(server, "long", turns=2)
        whole = await export(server, **{**PADDED, "response_length": 256})
        least = whole["samples"][0]["response_lengths"][0]
        body = {**PADDED, "response_length": least}
        response = await server.post("/export_trajectories", {**body, "format": "npz"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "on_too_long")
        assert "'long'" in response.json()["error"]["message"]
        dropped = await export(server, **body, on_too_long="drop")
        assert [sample["session_id"] for sample in dropped["samples"]] == ["short"]
        assert {name: entry["dropped_samples"] for name, entry in entries(dropped).items()} == {
            "short": 0,
            "long": 1,
        }
        cut = await export(server, **body, on_too_long="truncate", keep="tail")
        long = cut["samples"][1]
        assert (
            long["responses"] == whole["samples"][1]["responses"][: whole["samples"][1]["response_lengths"][0]][-least:]
        )
        assert long["truncated_tokens"] == whole["samples"][1]["response_lengths"][0] - least


async def test_stale_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server, turns=1)
        await server.ok("/engine/update_weights", {"path": "anywhere", "version": 5})
        await server.chat([user("another conversation")])
        for layout, filters, versions, stale in (
            ("individual", {"min_version": 5}, [{5}], 1),
            ("concat", {"min_version": 5}, [{5}], 1),
            ("individual", {"max_version_span": 0}, [{0}, {5}], 0),
            ("tree", {"max_version_span": 0}, [{0, 5}], 0),
            ("tree", {"min_version": 5}, [{5}], 1),
            ("tree", {"min_version": 6}, [], 2),
        ):
            answer = await export(server, layout=layout, filter=filters)
            assert [set(sample["versions"]) - {-1} for sample in answer["samples"]] == versions
            assert entries(answer)["s"]["stale_turns" if layout == "tree" else "stale_samples"] == stale
        assert "stale_samples" not in entries(await export(server))["s"]
