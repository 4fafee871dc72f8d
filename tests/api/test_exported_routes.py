"""Exports, rewards, marks and the tree of sessions with turns of several routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import exports
from tests.routed import ONE_TRAINED, TWO_TRAINED, record
from tests.support import Server, default_url, says, serving, user

GAME = ("policy", "opponent", "policy", "judge", "rival")


async def refusal(server: Server, path: str, body: Any) -> tuple[int, str | None, str]:
    response = await server.post(path, body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


def routes_of(samples: list[Any]) -> list[str]:
    return [sample["route"] for sample in samples]


async def test_an_export_has_the_trained_routes_unless_others_are_named(tmp_path: Path) -> None:
    await record(default_url(tmp_path), "s", *GAME)
    async with serving(tmp_path, says(), models=TWO_TRAINED) as server:
        assert routes_of(await server.export()) == ["policy", "policy", "rival"]
        assert routes_of(await server.export(route="policy")) == ["policy", "policy"]
        assert routes_of(await server.export(route=["rival"])) == ["rival"]
        (asked,) = await server.export(route=["opponent"])
        assert (asked["route"], sum(asked["loss_mask"])) == ("opponent", 0)
        answer = await server.ok("/trajectories/export", {"session_id": "s"})
        [entry] = answer["sessions"]
        assert entry["untrained_tokens"] == {"frozen": 2}
        assert entry["routes"]["judge"] == {"kind": "external", "turns": 1}
        answer = await server.ok("/trajectories/export", {"session_id": "s", "route": ["rival"]})
        assert answer["sessions"][0]["untrained_tokens"] == {"frozen": 2, "route": 4}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"route": ["judge"]}, "external: its turns have no token ids"),
        ({"route": ["riwal"]}, "which no turn has; there are 'judge', 'opponent', 'policy' and 'rival'"),
        ({"filter": {"min_version": 1}}, "trained routes 'policy' and 'rival': name one"),
        ({"filter": {"max_version_span": 0}, "route": ["rival", "policy"]}, "'policy' and 'rival': name one"),
    ],
)
async def test_an_export_that_cannot_be_is_refused_by_name(tmp_path: Path, body: Any, told: str) -> None:
    await record(default_url(tmp_path), "s", *GAME)
    async with serving(tmp_path, says(), models=TWO_TRAINED) as server:
        status, param, message = await refusal(server, "/trajectories/export", {"session_id": "s", **body})
        assert (status, param) == (400, "route")
        assert told in message


async def test_versions_are_compared_within_a_named_route(tmp_path: Path) -> None:
    await record(default_url(tmp_path), "s", *GAME)
    async with serving(tmp_path, says(), models=TWO_TRAINED) as server:
        recent = await server.export(route=["policy"], filter={"min_version": 1})
        assert [sample["interaction_id"] for sample in recent] == ["s-2"]
    async with serving(tmp_path, says()) as server:  # the turns tell what the table no longer does
        status, param, _ = await refusal(server, "/trajectories/export", {"filter": {"min_version": 1}})
        assert (status, param) == (400, "route")


async def test_turns_from_before_there_was_a_table_are_of_the_servers_own_route(tmp_path: Path) -> None:
    await record(default_url(tmp_path), "s", "", "policy", "rival")
    async with serving(tmp_path, says(), models=TWO_TRAINED) as server:
        found = await server.export(route=["policy"])
        assert [sample["interaction_id"] for sample in found] == ["s-0", "s-1"]
        assert "route" not in found[0]


@pytest.mark.parametrize("name", ["json", "jsonl", "npz", "safetensors", "arrow", "parquet"])
async def test_each_format_names_the_route_of_a_sample(tmp_path: Path, name: str) -> None:
    await record(default_url(tmp_path), "s", "policy", "rival")
    async with serving(tmp_path, says(), models=TWO_TRAINED) as server:
        response = await server.post("/trajectories/export", {"format": name})
        assert response.status_code == 200, response.text
        assert routes_of(exports.read(name, response.content)["samples"]) == ["policy", "rival"]


@pytest.mark.parametrize("name", ["json", "jsonl", "npz", "safetensors", "arrow", "parquet", "areal"])
async def test_without_a_table_no_format_has_a_route(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, says("a")) as server:
        await server.ok("/rl/start_session", {"session_id": "s"})
        await server.chat([user("hi")])
        response = await server.post("/trajectories/export", {"format": name})
        assert b"route" not in response.content


async def test_a_reward_goes_to_the_last_turn_of_a_trained_route(tmp_path: Path) -> None:
    await record(default_url(tmp_path), "s", "policy", "rival", "opponent", "judge", ended=False)
    async with serving(tmp_path, says(), models=TWO_TRAINED) as server:
        assert await server.ok("/s/rl/set_reward", {"reward": 1.0}) == {"interaction_ids": ["s-1"]}
        named = {"reward": 2.0, "route": "policy"}
        assert await server.ok("/s/rl/set_reward", named) == {"interaction_ids": ["s-0"]}
        scored = await server.ok("/s/rl/set_reward", {"step_scores": [0.5, 0.25]})
        assert scored == {"interaction_ids": ["s-0", "s-1"]}
        scored = await server.ok("/s/rl/set_reward", {"step_scores": [3.0], "route": "opponent"})
        assert scored == {"interaction_ids": ["s-2"]}
        assert {each["route"]: each["score"] for each in await server.export()} == {"policy": 0.5, "rival": 0.25}
        status, param, message = await refusal(server, "/s/rl/set_reward", {"reward": 1.0, "route": "x"})
        assert (status, param) == (404, "route")
        assert "'policy' (1 turn), 'rival' (1 turn), 'opponent' (1 turn), 'judge' (1 turn)" in message
        of_another = {"reward": 1.0, "turn": 0, "route": "rival"}
        assert (await refusal(server, "/s/rl/set_reward", of_another))[:2] == (400, "route")


async def test_the_score_of_an_end_goes_to_a_trained_route(tmp_path: Path) -> None:
    await record(default_url(tmp_path), "s", "policy", "opponent", ended=False)
    async with serving(tmp_path, says(), models=ONE_TRAINED) as server:
        await server.ok("/s/rl/end_session", {"score": 0.75})
        assert [turn["reward"] for turn in await server.tree()] == [0.75, None]


async def test_a_frozen_turn_cannot_be_marked_as_trainable(tmp_path: Path) -> None:
    await record(default_url(tmp_path), "s", "policy", "opponent", ended=False)
    async with serving(tmp_path, says(), models=ONE_TRAINED) as server:
        status, param, message = await refusal(server, "/s/rl/mark", {"turn": 1, "trainable": True})
        assert (status, param) == (400, "trainable")
        assert "route 'opponent', which is frozen" in message
        await server.ok("/s/rl/mark", {"turn": 1, "trainable": False})
        of_another = {"turn": 1, "route": "policy", "trainable": False}
        assert (await refusal(server, "/s/rl/mark", of_another))[:2] == (400, "route")


async def test_the_tree_the_listing_and_the_tokens_show_routes(tmp_path: Path) -> None:
    await record(default_url(tmp_path), "s", *GAME)
    async with serving(tmp_path, says(), models=TWO_TRAINED) as server:
        shown = (await server.http.get("/rl/sessions/s", params={"include": "score"})).json()
        assert [(turn["route"], turn["route_kind"]) for turn in shown["interactions"]][1:4] == [
            ("opponent", "frozen"),
            ("policy", "policy"),
            ("judge", "external"),
        ]
        assert not any(turn["notes"].keys() & {"route", "route_kind"} for turn in shown["interactions"])
        assert shown["routes"]["policy"] == {"kind": "policy", "turns": 2}
        [listed] = (await server.http.get("/rl/sessions", params={"include": "summary"})).json()["sessions"]
        assert listed["summary"]["routes"] == shown["routes"]
        turn = "/rl/sessions/s/interactions/1"
        default = (await server.http.get(turn, params={"include": "tokens"})).json()["tokens"]
        assert [run["state"] for run in default["states"]] == ["context", "frozen"]
        response = await server.http.get(turn, params={"include": "tokens", "route": '["rival"]'})
        assert response.json()["tokens"]["export"]["trained_tokens"] == 2
        response = await server.http.get(turn, params={"include": "tokens", "route": '["judge"]'})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "route")


async def test_an_external_turn_can_be_read_and_has_no_tokens(tmp_path: Path) -> None:
    await record(default_url(tmp_path), "s", "policy", "judge")
    async with serving(tmp_path, says(), models=ONE_TRAINED) as server:
        include = "messages,ids,logprobs,compared,tokens,replay,columns"
        response = await server.http.get("/rl/sessions/s/interactions/1", params={"include": include})
        assert response.status_code == 200, response.text
        turn = response.json()
        assert (turn["route_kind"], turn["prompt_ids"], turn["output_ids"], turn["logprobs"]) == (
            "external",
            [],
            [],
            None,
        )
        assert [message["content"] for message in (*turn["messages"], turn["output"])] == ["to s-1", "from s-1"]
        assert turn["tokens"]["ids"] == []
        for layout in ("individual", "concat", "tree"):
            assert routes_of(await server.export(layout=layout, include=["messages"])) == ["policy"]


async def test_two_policies_of_one_episode_have_groups_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        await record(default_url(tmp_path), name, "policy", "rival", ended=False, group_id="g")
    async with serving(tmp_path, says(), models=TWO_TRAINED) as server:
        for name, own, other in (("a", 1.0, 0.0), ("b", 0.0, 3.0)):
            await server.ok(f"/{name}/rl/end_session", {"rewards": {f"{name}-0": own, f"{name}-1": other}})
        body = {"advantages": "leave_one_out", "filter": {"group_id": "g"}}
        answer = await server.ok("/trajectories/export", body)
        found = {(each["session_id"], each["route"]): each["advantages"] for each in answer["samples"]}
        assert found == {
            ("a", "policy"): [1.0],
            ("a", "rival"): [-3.0],
            ("b", "policy"): [-1.0],
            ("b", "rival"): [3.0],
        }
        assert [entry["group_members"] for entry in answer["sessions"]] == [2, 2]
