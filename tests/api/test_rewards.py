"""Rewards are stored as set, returns are computed from them, and a session ends once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.interface import PauseMode
from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.databases import execute
from tests.exports import entries
from tests.support import Server, assistant, default_url, function_tool, sampled, says, serving, system, until, user


async def conversation(server: Server, turns: int = 3, session: str = "s") -> list[str]:
    """Run a chain of turns; return the ids of its interactions."""
    messages: list[Any] = []
    ids = []
    for number in range(turns):
        messages.append(user(f"question {number}"))
        reply = await server.chat(messages, session)
        ids.append(reply["id"])
        messages.append(reply["choices"][0]["message"])
    return ids


async def column(server: Server, name: str, session: str = "s") -> list[Any]:
    return [node[name] for node in await server.tree(session)]


def stored_returns(folder: Path) -> dict[str, float]:
    return dict(execute(default_url(folder), "SELECT interaction_id, value FROM returns"))


async def test_returns_match_areals_documented_example_and_are_persisted_at_the_end(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b", "c"), discount=0.9) as server:
        ids = await conversation(server)
        await server.ok("/s/rl/set_reward", {"reward": 1})
        assert stored_returns(tmp_path) == {}
        assert await server.ok("/s/rl/end_session", {}) == {"interaction_count": 3}
        assert await column(server, "return") == pytest.approx([0.81, 0.9, 1.0])
        assert await column(server, "reward") == [None, None, 1.0]
        assert stored_returns(tmp_path) == pytest.approx(dict(zip(ids, [0.81, 0.9, 1.0], strict=True)))


async def test_a_reward_after_the_end_recomputes_the_persisted_returns(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b", "c")) as server:
        ids = await conversation(server)
        await server.ok("/s/rl/end_session", {"reward": 1})
        assert stored_returns(tmp_path) == dict.fromkeys(ids, 1.0)
        await server.ok("/s/rl/set_reward", {"reward": -2.5, "interaction_id": ids[1]})
        assert stored_returns(tmp_path) == dict(zip(ids, [-1.5, -1.5, 1.0], strict=True))
        assert await column(server, "return") == [-1.5, -1.5, 1.0]


async def test_rewards_and_returns_survive_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        ids = await conversation(server, 2)
        await server.ok("/s/rl/set_reward", {"rewards": {ids[0]: 0.1, ids[1]: 2}})
        await server.ok("/s/rl/set_reward", {"reward": 0.3, "name": "style"})
        await server.ok("/s/rl/end_session", {})
        before = await server.tree()
    async with serving(tmp_path, says()) as server:
        assert await server.tree() == before
        assert await column(server, "reward") == [0.1, 2.0]
        assert await column(server, "rewards") == [{}, {"style": 0.3}]


async def test_a_reward_without_id_goes_to_the_last_complete_interaction(tmp_path: Path) -> None:
    script = play([Reply(sampled("a")), Reply(sampled("b")), Reply(sampled("c"), fault=Fault.ERROR)])
    async with serving(tmp_path, script) as server:
        ids = await conversation(server, 2)
        failed = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("x")]})
        assert failed.status_code == 502
        assert await server.ok("/s/rl/set_reward", {"reward": 1}) == {"interaction_ids": [ids[1]]}
        assert await column(server, "status") == ["complete", "complete", "failed"]
        assert await column(server, "reward") == [None, 1.0, None]


TITLE = system("You are a title generator. You output ONLY a thread title.")
SUMMARY = "Your task is to create a detailed summary of the conversation so far."
TOOL = function_tool("read")


async def test_a_reward_without_id_goes_to_the_main_agent_and_never_to_a_side_call(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "title", "summary", "sub", "side")) as server:
        main = (await server.chat([system("S"), user("q")], tools=[TOOL]))["id"]
        await server.chat([TITLE, user("name this")])
        await server.chat([system("S"), user("q"), assistant("a"), user(SUMMARY)], tools=[TOOL])
        await server.chat([system("You explore."), user("look around")], tools=[TOOL])
        await server.chat([user("is this polite?")])
        assert await column(server, "purpose") == ["main", "title", "summary", "subagent", "aux"]
        assert await server.ok("/s/rl/set_reward", {"reward": 1}) == {"interaction_ids": [main]}
        await server.ok("/s/rl/end_session", {"reward": 2})
        assert await column(server, "reward") == [2.0, None, None, None, None]


async def test_a_reward_that_was_given_stays_when_its_turn_turns_out_to_be_a_side_call(tmp_path: Path) -> None:
    async with serving(tmp_path, says("title", "a")) as server:
        first = (await server.chat([user("name this")]))["id"]
        assert await server.ok("/s/rl/set_reward", {"reward": 1}) == {"interaction_ids": [first]}
        await server.chat([system("S"), user("q")], tools=[TOOL])
        assert await column(server, "purpose") == ["aux", "main"]
        assert await column(server, "reward") == [1.0, None]


@pytest.mark.parametrize("kind", [{"reward": 1}, {"token_rewards": [0.5]}, {"reward": 1, "name": "style"}])
async def test_a_session_of_side_calls_has_no_turn_for_a_reward_without_id(
    tmp_path: Path, kind: dict[str, Any]
) -> None:
    async with serving(tmp_path, says("title", "two")) as server:
        title = (await server.chat([TITLE, user("name this")]))["id"]
        response = await server.post("/s/rl/set_reward", kind)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "interaction_id")
        assert f"0 (title, {title})" in error["message"] and "'turn'" in error["message"]
        assert (await server.post("/s/rl/end_session", kind)).status_code == 400
        assert await column(server, "reward") == [None]
        await server.ok("/s/rl/set_reward", {"reward": 1, "turn": 0})


@pytest.mark.parametrize(
    ("align", "scores", "rewards"),
    [
        ("first", [1, -1], [1.0, -1.0, None]),
        ("last", [1, -1], [None, 1.0, -1.0]),
        ("strict", [1, -1, 0.5], [1.0, -1.0, 0.5]),
        ("first", [1, -1, 0.5], [1.0, -1.0, 0.5]),
        ("last", [], [None, None, None]),
    ],
)
async def test_step_scores_are_aligned_with_the_first_or_the_last_turns(
    tmp_path: Path, align: str, scores: list[float], rewards: list[float | None]
) -> None:
    async with serving(tmp_path, says("a", "b", "c")) as server:
        await conversation(server)
        await server.ok("/s/rl/end_session", {"step_scores": scores, "align": align})
        assert await column(server, "reward") == rewards


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"step_scores": [1]}, "step_scores"),
        ({"step_scores": [1], "align": "strict"}, "step_scores"),
        ({"step_scores": [1, 2, 3], "align": "first"}, "step_scores"),
        ({"step_scores": [1, 2, 3], "align": "last"}, "step_scores"),
    ],
)
async def test_the_error_for_step_scores_that_do_not_fit_names_the_turns(
    tmp_path: Path, body: dict[str, Any], param: str
) -> None:
    async with serving(tmp_path, says("title", "a")) as server:
        ids = [(await server.chat([TITLE, user("q")]))["id"], (await server.chat([user("q")]))["id"]]
        response = await server.post("/s/rl/set_reward", body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert f"0 (title, {ids[0]}), 1 (main, {ids[1]})" in error["message"]
        assert await column(server, "reward") == [None, None]


async def test_step_scores_have_one_value_per_complete_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b", "c")) as server:
        await conversation(server)
        await server.ok("/s/rl/set_reward", {"step_scores": [1, 0, -0.5]})
        assert await column(server, "reward") == [1.0, 0.0, -0.5]


async def test_token_rewards_have_one_value_per_output_token(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one two")) as server:
        (node,) = await conversation(server, 1)
        count = len(sampled("one two"))
        body = {"interaction_id": node, "token_rewards": [0.5] * count}
        assert await server.ok("/s/rl/set_reward", body) == {"interaction_ids": [node]}
        for wrong in (count - 1, count + 1, 0):
            response = await server.post("/s/rl/set_reward", {**body, "token_rewards": [0.5] * wrong})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "token_rewards")


async def test_the_last_reward_wins_and_a_body_is_applied_as_a_whole(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        ids = await conversation(server, 2)
        await server.ok("/s/rl/set_reward", {"reward": 1})
        await server.ok("/s/rl/set_reward", {"reward": 0})
        response = await server.post("/s/rl/set_reward", {"rewards": {ids[0]: 5, "chatcmpl-x": 5}})
        assert response.status_code == 404
        response = await server.post("/s/rl/set_reward", {"rewards": {ids[0]: 5, ids[1]: "x"}})
        assert response.status_code == 400
        assert await column(server, "reward") == [None, 0.0]


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


BAD = [
    ({"reward": "1"}, "reward"),
    ({"reward": True}, "reward"),
    ({"reward": [1]}, "reward"),
    ({"reward": {}}, "reward"),
    ({"reward": 1e31}, "reward"),
    ({"reward": -(10**40)}, "reward"),
    ({"rewards": [1]}, "rewards"),
    ({"rewards": {"ID": None}}, "rewards.ID"),
    ({"rewards": {"ID": False}}, "rewards.ID"),
    ({"rewards": {"ID": "NaN"}}, "rewards.ID"),
    ({"rewards": {}}, "reward"),
    ({"rewards": {"ID": 1}, "interaction_id": "ID"}, "interaction_id"),
    ({"step_scores": 1}, "step_scores"),
    ({"step_scores": {}}, "step_scores"),
    ({"step_scores": []}, "step_scores"),
    ({"step_scores": [1, 2]}, "step_scores"),
    ({"step_scores": [None]}, "step_scores[0]"),
    ({"step_scores": [True]}, "step_scores[0]"),
    ({"step_scores": [1], "name": "x"}, "name"),
    ({"step_scores": [1], "reward": 1}, "step_scores"),
    ({"step_scores": [1], "align": "middle"}, "align"),
    ({"step_scores": [1], "align": 1}, "align"),
    ({"reward": 1, "align": "last"}, "align"),
    ({"align": "last"}, "step_scores"),
    ({"token_rewards": ["x"]}, "token_rewards[0]"),
    ({"token_rewards": "x"}, "token_rewards"),
    ({"reward": 1, "interaction_id": 5}, "interaction_id"),
    ({"reward": 1, "name": 5}, "name"),
    ({"reward": 1, "name": []}, "name"),
    ({"reward": 1, "rewards": {"ID": 1}}, "rewards"),
    ({}, "reward"),
    ({"reward": None}, "reward"),
    ({"rewrad": 1}, "rewrad"),
    ({"reward": 1, "interaction": "ID"}, "interaction"),
    ({"reward": 1, "outcome": "Finished"}, "outcome"),
    ({"reward": 1, "name": ""}, "name"),
    ({"interaction_id": "ID"}, "reward"),
    ({"name": "style"}, "reward"),
    ([], "body"),
    ("x", "body"),
]


async def test_a_bad_reward_is_400_with_its_field_and_changes_nothing(tmp_path: Path) -> None:
    wrong = []
    async with serving(tmp_path, says("a")) as server:
        (node,) = await conversation(server, 1)
        before = await server.tree()
        for bad, param in BAD:
            body: Any = bad
            if isinstance(body, dict) and isinstance(body.get("rewards"), dict):
                body = {**body, "rewards": dict.fromkeys([node] * len(body["rewards"]), *body["rewards"].values())}
            response = await server.post("/s/rl/set_reward", body)
            named = response.json().get("error", {}).get("param")
            if (response.status_code, named, await server.tree()) != (400, param.replace("ID", node), before):
                wrong.append((bad, response.text))
        assert not wrong, wrong
        assert await column(server, "reward") == [None]
        await server.ok("/s/rl/set_reward", {"reward": 1})


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
async def test_non_finite_numbers_are_refused_as_invalid_json(tmp_path: Path, text: str) -> None:
    async with serving(tmp_path, says("a")) as server:
        await conversation(server, 1)
        for path in ("set_reward", "end_session"):
            response = await server.http.post(f"/s/rl/{path}", content=f'{{"reward": {text}}}')
            assert (response.status_code, response.json()["error"]["param"]) == (400, "body")
        assert (await server.http.get("/rl/sessions/s")).json()["status"] == "active"


@pytest.mark.parametrize("body", [{"reward": 1, "interaction_id": "x"}, {"rewards": {"x": 1}}, {"rewards": {"": 1}}])
async def test_an_unknown_interaction_is_404(tmp_path: Path, body: dict[str, Any]) -> None:
    async with serving(tmp_path, says("a")) as server:
        await conversation(server, 1)
        response = await server.post("/s/rl/set_reward", body)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["set_reward", "end_session"])
async def test_an_unknown_session_is_404_and_is_not_created(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says()) as server:
        response = await server.post(f"/nobody/rl/{path}", {"reward": 1})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
        assert (await server.http.get("/rl/sessions")).json() == {"sessions": [], "cursor": None}


async def test_a_session_without_turns_cannot_be_rewarded_but_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        await server.ok("/rl/start_session", {"session_id": "s"})
        response = await server.post("/s/rl/set_reward", {"reward": 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "interaction_id")
        assert await server.ok("/s/rl/end_session", {"outcome": "NoData"}) == {"interaction_count": 0}


async def test_the_end_needs_no_body_is_idempotent_and_seals_the_session(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        await conversation(server, 1)
        ending = {"outcome": "Finished", "exit_reason": "done", "metrics": {"acc": 0.5}, "finished": True, "reward": 2}
        assert await server.ok("/s/rl/end_session", ending) == {"interaction_count": 1}
        again = await server.http.post("/s/rl/end_session")
        assert again.json() == {"interaction_count": 1}
        turn = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("hi")]})
        assert (turn.status_code, turn.json()["error"]["code"]) == (403, "session_closed")
        shown = (await server.http.get("/rl/sessions/s")).json()
        assert (shown["status"], shown["outcome"], shown["exit_reason"]) == ("ended", "Finished", "done")
        assert shown["metrics"] == {"acc": 0.5} and shown["finished"] is True
        entry = entries(await server.ok("/export_trajectories", {"session_id": "s"}))["s"]
        assert (entry["outcome"], entry["metrics"], entry["rewarded"]) == ("Finished", {"acc": 0.5}, True)


BAD_ENDS: list[tuple[dict[str, Any], str]] = [
    ({"outcome": "finished"}, "outcome"),
    ({"outcome": 1}, "outcome"),
    ({"outcome": []}, "outcome"),
    ({"exit_reason": 5}, "exit_reason"),
    ({"exit_reason": "a\0b"}, "exit_reason"),
    ({"metrics": []}, "metrics"),
    ({"metrics": "x"}, "metrics"),
    ({"metrics": False}, "metrics"),
    ({"finished": "yes"}, "finished"),
    ({"finished": 1}, "finished"),
    ({"reward": "x"}, "reward"),
    ({"step_scores": [1, 2, 3]}, "step_scores"),
    ({"reward": 1, "finished": 0}, "finished"),
    ({"reward": 1, "exit_reason": "a\0b"}, "exit_reason"),
    ({"metrics": nested(260)}, "metrics"),
    ({"metrics": nested(250)}, "metrics"),
    ({"rewrd": 1}, "rewrd"),
    ({"reward": 1, "outcomes": "Finished"}, "outcomes"),
    ({"turn": 0}, "reward"),
    ({"reward": 1, "name": ""}, "name"),
]


async def test_a_bad_end_is_400_with_its_field_and_leaves_the_session_open(tmp_path: Path) -> None:
    wrong = []
    async with serving(tmp_path, says("a", "b")) as server:
        await conversation(server, 1)
        for body, param in BAD_ENDS:
            response = await server.post("/s/rl/end_session", body)
            named = response.json().get("error", {}).get("param")
            shown = (await server.http.get("/rl/sessions/s")).json()
            is_open = shown["status"] == "active" and shown["interactions"][0]["reward"] is None
            if (response.status_code, named, is_open) != (400, param, True):
                wrong.append((body, response.text))
        assert not wrong, wrong
        await server.chat([user("still here")])


FIRST_END = {"outcome": "Finished", "exit_reason": "done", "metrics": {"acc": 0.5}, "finished": True, "reward": 2}


@pytest.mark.parametrize(
    ("second", "param"),
    [
        ({"outcome": "Failed"}, "outcome"),
        ({**FIRST_END, "exit_reason": "late"}, "exit_reason"),
        ({**FIRST_END, "metrics": {"acc": 0.6}}, "metrics"),
        ({**FIRST_END, "finished": False}, "finished"),
        ({**FIRST_END, "reward": 3}, "reward"),
        ({"step_scores": [1, 2]}, "step_scores"),
        ({"reward": 2, "turn": 0}, "reward"),
    ],
)
async def test_a_second_end_that_says_something_else_is_409_and_changes_nothing(
    tmp_path: Path, second: dict[str, Any], param: str
) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        await conversation(server, 2)
        await server.ok("/s/rl/end_session", FIRST_END)
        before = (await server.http.get("/rl/sessions/s")).json()
        response = await server.post("/s/rl/end_session", second)
        assert (response.status_code, response.json()["error"]["param"]) == (409, param), response.text
        assert response.headers["x-should-retry"] == "false"
        assert (await server.http.get("/rl/sessions/s")).json() == before


async def test_a_second_end_that_says_the_same_or_less_is_no_error_and_changes_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        await conversation(server, 2)
        await server.ok("/s/rl/end_session", FIRST_END)
        before = (await server.http.get("/rl/sessions/s")).json()
        for again in (FIRST_END, {"outcome": "Finished"}, {"reward": 2, "turn": 1}, {"metrics": {}}, {}):
            assert await server.ok("/s/rl/end_session", again) == {"interaction_count": 2}
        assert (await server.http.get("/rl/sessions/s")).json() == before


@pytest.mark.parametrize(
    ("reward", "other"),
    [
        ({"reward": 2}, {"reward": 3}),
        ({"reward": 2, "name": "style"}, {"reward": 3, "name": "style"}),
        ({"token_rewards": [1, 2]}, {"token_rewards": [0, 0]}),
    ],
)
async def test_a_second_end_is_the_same_although_a_turn_that_ran_at_the_first_has_followed(
    tmp_path: Path, reward: dict[str, Any], other: dict[str, Any]
) -> None:
    async with serving(tmp_path, says("a", "longer than the first")) as server:
        await server.chat([user("x")])
        await server.engine.pause(PauseMode.IN_PLACE)
        turn = asyncio.ensure_future(server.chat([user("y")]))
        await until(lambda: bool(server.engine.running))
        await server.ok("/s/rl/end_session", reward)
        await server.engine.resume()
        await turn
        assert await server.ok("/s/rl/end_session", reward) == {"interaction_count": 2}
        assert (await server.post("/s/rl/end_session", other)).status_code == 409


async def test_the_bodies_of_areals_clients_are_accepted(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        await server.http.post("/grant_capacity")
        started = await server.ok("/rl/start_session", {"task_id": "s", "api_key": None})
        name = started["session_id"]
        await conversation(server, 1, name)
        await server.ok(f"/{name}/rl/set_reward", {"interaction_id": None, "reward": 1.0})
        await server.ok(f"/{name}/rl/set_reward", {"interaction_id": None, "reward": 1.0, "model": "any"})
        await server.ok(f"/{name}/rl/end_session", {})
        await server.ok("/export_trajectories", {"session_id": name, "discount": 1.0, "style": "individual"})


async def test_concurrent_ends_and_rewards_leave_one_consistent_end(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        ids = await conversation(server, 2)
        ends = [server.ok("/s/rl/end_session", {}) for _ in range(5)]
        rewards = [server.ok("/s/rl/set_reward", {"reward": number}) for number in range(5)]
        await asyncio.gather(*ends, *rewards)
        last = (await server.tree())[-1]["reward"]
        assert stored_returns(tmp_path) == dict.fromkeys(ids, last)


BAD_STARTS: list[tuple[dict[str, Any], str]] = [
    ({}, "task_id"),
    ({"task_id": None}, "task_id"),
    ({"task_id": 5}, "task_id"),
    ({"task_id": "a b"}, "task_id"),
    ({"task_id": "t", "session_id": 5}, "session_id"),
    ({"task_id": "t", "group_id": []}, "group_id"),
    ({"task_id": "t", "group_id": "a\0"}, "group_id"),
    ({"task_id": "t", "metadata": [1]}, "metadata"),
    ({"task_id": "t", "metadata": 0}, "metadata"),
    ({"task_id": "t", "metadata": nested(260)}, "metadata"),
    ({"task_id": "t", "metdata": {}}, "metdata"),
    ({"task_id": "t", "limit": {"max_turns": 1}}, "limit"),
    ({"task_id": "t", "discount": 1.5}, "discount"),
    ({"task_id": "t", "discount": "1"}, "discount"),
    ({"task_id": "t", "discount": True}, "discount"),
    ({"task_id": "t", "credit": "flat"}, "credit"),
    ({"task_id": "t", "credit": {}}, "credit"),
    ({"task_id": "t", "limits": [1]}, "limits"),
    ({"task_id": "t", "limits": {"max_trns": 1}}, "limits.max_trns"),
    ({"task_id": "t", "limits": {"max_turns": "3"}}, "limits.max_turns"),
    ({"task_id": "t", "limits": {"max_turns": 2.5}}, "limits.max_turns"),
    ({"task_id": "t", "limits": {"max_turns": 0}}, "limits.max_turns"),
    ({"task_id": "t", "limits": {"max_tokens_per_turn": 0}}, "limits.max_tokens_per_turn"),
    ({"task_id": "t", "limits": {"max_total_tokens": -1}}, "limits.max_total_tokens"),
    ({"task_id": "t", "limits": {"max_context_tokens": True}}, "limits.max_context_tokens"),
    ({"task_id": "t", "limits": {"deadline_s": "soon"}}, "limits.deadline_s"),
    ({"task_id": "t", "limits": {"on_context_overflow": "cut"}}, "limits.on_context_overflow"),
    ({"task_id": "t", "limits": {"on_context_overflow": []}}, "limits.on_context_overflow"),
    ({"task_id": "t", "sampling": "greedy"}, "sampling"),
    ({"task_id": "t", "sampling": {"temprature": 1}}, "sampling.temprature"),
    ({"task_id": "t", "sampling": {"temperature": -1}}, "sampling.temperature"),
    ({"task_id": "t", "sampling": {"top_p": 2}}, "sampling.top_p"),
    ({"task_id": "t", "sampling": {"max_tokens": 2.5}}, "sampling.max_tokens"),
    ({"task_id": "t", "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ({"task_id": "t", "sampling": {"seed": 1.5}}, "sampling.seed"),
    ({"task_id": "t", "sampling": {"stop": [5]}}, "sampling.stop[0]"),
]


async def test_a_bad_start_is_400_and_names_the_field(tmp_path: Path) -> None:
    wrong = []
    async with serving(tmp_path, says()) as server:
        for body, param in BAD_STARTS:
            response = await server.post("/rl/start_session", body)
            named = response.json().get("error", {}).get("param")
            begun = (await server.http.get("/rl/sessions")).json()["sessions"]
            if (response.status_code, named, begun) != (400, param, []):
                wrong.append((body, response.text))
    assert not wrong, wrong


async def test_null_counts_as_absent_at_the_start(tmp_path: Path) -> None:
    names = ("task_id", "group_id", "api_key", "metadata", "sampling", "limits", "discount", "credit")
    async with serving(tmp_path, says("a"), discount=0.5) as server:
        await server.ok("/rl/start_session", {"session_id": "s", **dict.fromkeys(names)})
        shown = (await server.http.get("/rl/sessions/s")).json()
        assert (shown["task_id"], shown["discount"], shown["credit"]) == ("s", 0.5, "tree")
        await server.chat([user("hi")])


async def test_sampling_defaults_of_the_session_apply_to_absent_fields(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        sampling = {"temperature": 0.25, "presence_penalty": -1, "max_tokens": 7, "top_k": 3}
        await server.ok("/rl/start_session", {"session_id": "s", "sampling": sampling})
        await server.chat([user("hi")])
        await server.chat([user("hi")], temperature=0.75)
        first, second = (request.sampling for request in server.engine.requests)
        assert (first.temperature, first.presence_penalty, first.max_tokens, first.top_k) == (0.25, -1.0, 7, 3)
        assert (second.temperature, second.max_tokens) == (0.75, 7)
