"""The games under ROLL's ids: same seed, same game; every room can be solved; rewards, metrics and messages."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from enum import Enum
from typing import Any

import pytest

pytest.importorskip("gem")

from tokengrove.errors import InvalidRequest
from tokengrove.roll.envs import register_game, register_games
from tokengrove.roll.envs.frozen_lake import generate_map
from tokengrove.roll.envs.sokoban_room import STEPS, Room, generate_room
from tokengrove.roll.runners.environments import make_environment
from tokengrove.roll.values import Section

WORDS = ("Up", "Down", "Left", "Right")
SMALL = {"dim_room": [6, 6], "num_boxes": 1, "search_depth": 10}


def made(env_type: str, **config: Any) -> Any:
    return make_environment({"env_type": env_type}, config)


def solution(room: Room) -> list[int]:
    """The numbers (from 1) of the shortest way to push all boxes onto targets."""
    waiting, seen = deque([(deepcopy(room), [])]), set()
    while waiting:
        here, path = waiting.popleft()
        if here.solved_boxes == len(here.boxes):
            return path
        state = (here.player, frozenset(here.boxes))
        if state in seen:
            continue
        seen.add(state)
        for number, step in enumerate(STEPS, 1):
            there = deepcopy(here)
            if there.push(step):
                waiting.append((there, [*path, number]))
    raise AssertionError("the room has no solution")


@pytest.mark.parametrize(("dim_room", "boxes", "depth"), [((6, 6), 1, 300), ((6, 6), 1, 10), ((10, 10), 2, 10)])
def test_every_room_can_be_solved_and_none_is_solved_already(dim_room: tuple[int, int], boxes: int, depth: int) -> None:
    for seed in range(15):
        room = generate_room(random.Random(seed), dim_room, boxes, depth)
        assert len(room.boxes) == len(room.targets) == boxes and room.solved_boxes == 0
        assert room.player in room.floor - room.boxes and room.boxes <= room.floor
        assert all(0 < row < dim_room[0] - 1 and 0 < column < dim_room[1] - 1 for row, column in room.floor)
        assert 0 < len(solution(room)) <= depth


def test_the_right_moves_solve_the_game_and_earn_its_rewards() -> None:
    env = made("sokoban", **SMALL, action_pattern="<answer>(.*?)</answer>", max_steps=30, format_penalty=-0.15)
    text, info = env.reset(seed=3)
    assert info["env_instruction"].endswith("Up, Down, Left, Right") and "box on target" in info["env_instruction"]
    assert sorted(text.replace("\n", "").replace("#", "").replace("_", "")) == sorted("OXP")
    path, rewards = solution(env.room), []
    for number in path:
        text, reward, terminated, truncated, info = env.step(f"I go <answer> {WORDS[number - 1].lower()} </answer>")
        rewards.append(reward)
        assert info["metrics"]["action_is_valid"] and info["metrics"]["action_is_effective"]
        assert info["metrics"]["format_penalty"] == 0.0 and info["action"] == number
    assert rewards == pytest.approx([-0.1] * (len(path) - 1) + [10.9])
    assert (terminated, truncated, info["metrics"]["success"]) == (True, False, True) and "√" in text


def test_a_step_without_an_action_counts_and_costs_its_penalty() -> None:
    env = made("sokoban", **SMALL, max_steps=3, format_penalty=-0.15)
    before, _ = env.reset(seed=1)
    for wrong in ("no answer", "<answer>Jump</answer>", None):
        text, reward, terminated, truncated, info = env.step(wrong)
        assert text == before and reward == pytest.approx(-0.25) and info["action"] is None
        assert info["metrics"] == {
            **{"action_is_effective": False, "action_is_valid": False},
            **{"success": False, "format_penalty": -0.15},
        }
    assert (terminated, truncated) == (True, True)
    modes = {"action_is_effective": "mean", "action_is_valid": "mean", "success": "last", "format_penalty": "mean"}
    assert info["metrics_agg_mode"] == modes


def test_a_box_pushed_off_its_target_costs_what_it_earned() -> None:
    env = made("sokoban")
    env.reset(seed=0)
    env.num_boxes = 2
    env.room = Room(
        3, 7, frozenset((1, column) for column in range(1, 6)), frozenset({(1, 3), (1, 5)}), {(1, 2), (1, 5)}, (1, 1)
    )
    assert env.render() == "#######\n#PXO_√#\n#######"
    assert env.step("<answer>Right</answer>")[1] == pytest.approx(-0.1 + 1 + 10)
    env.num_boxes = 3  # so that it is not over
    assert env.step("<answer>Right</answer>")[1] == pytest.approx(-0.1 - 1)
    assert env.render() == "#######\n#__SX√#\n#######"
    blocked = env.step("<answer>Right</answer>")
    assert blocked[1] == pytest.approx(-0.1) and not blocked[4]["metrics"]["action_is_effective"]


def test_a_thought_before_the_action_is_told_apart() -> None:
    env = made("sokoban", **SMALL, action_pattern=r"<think>(.*?)</think>\s*<answer>(.*?)</answer>")
    env.reset(seed=1)
    info = env.step("<think>why not\nleft</think>\n<answer>Left</answer><|im_end|>")[4]
    assert (info["action"], info["action_content"], info["think_content"]) == (3, "Left", "why not\nleft")
    assert env.step("<answer>Left</answer>")[4]["action"] is None


def test_other_signs_and_names_are_those_of_the_configuration() -> None:
    signs = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}
    vocab = {"W": "wall", ".": "empty", "G": "target", "C": "box on target", "B": "box", "A": "player", "@": "both"}
    texts = {str(number): sign for number, sign in signs.items()}  # as JSON and overrides write them
    for lookup in (signs, texts, Section(signs)):
        env = made("sokoban", **SMALL, grid_lookup=lookup, grid_vocab=vocab, action_lookup={1: "North"})
        text, info = env.reset(seed=2)
        assert set(text) - {"\n"} <= set("W.GBA") and "@: both" in info["env_instruction"]
        assert env.step("<answer>north</answer>")[4]["action"] == 1
        assert env.step("<answer>Up</answer>")[4]["action"] is None


@pytest.mark.parametrize(
    ("env_type", "config"),
    [("sokoban", SMALL), ("frozen_lake", {"is_slippery": True}), ("sokoban_tool_call", {}), ("sokoban_native_env", {})],
)
def test_a_seed_is_a_game_in_every_thread_and_the_program_draws_as_before(
    env_type: str, config: dict[str, Any]
) -> None:
    def played(seed: int) -> list[Any]:
        env = made(env_type, **config)
        observations = [env.reset(seed=seed)[0]]
        for word in WORDS * 5:
            answer, move = f"<answer>{word}</answer>", {"content": "", "tool_calls": [call(word.lower())]}
            observations.append(env.step(move if env_type == "sokoban_tool_call" else answer)[:2])
        return observations

    random.seed(5)
    expected = random.random()
    random.seed(5)
    with ThreadPoolExecutor(8) as threads:
        games = list(threads.map(played, [*[11] * 8, *range(20, 28)]))
    assert random.random() == expected
    assert all(game == games[0] for game in games[:8])
    assert len({str(game[0]) for game in games}) > 5


def test_every_lake_has_a_way_and_the_goal_earns_one() -> None:
    for seed in range(20):
        env = made("frozen_lake", size=4, p=0.7, is_slippery=False, format_penalty=-0.01, max_steps=50)
        text, info = env.reset(seed=seed)
        assert text.count("P") == text.count("G") == 1 and "Left, Down, Right, Up" in info["env_instruction"]
        invalid = env.step("nothing")
        assert invalid[:4] == (text, -0.01, False, False) and invalid[4]["metrics"]["format_penalty"] == -0.01
        path = _way(env.lake, env.player_pos)
        for number in path:
            text, reward, terminated, truncated, info = env.step(f"<answer>{env.ACTION_LOOKUP[number]}</answer>")
            assert reward == (1.0 if number is path[-1] and terminated else 0.0)
        assert (terminated, truncated, info["metrics"]["success"]) == (True, False, True) and "√" in text
        assert not info["metrics"]["format_penalty"]
        assert env.step("<answer>Left</answer>")[1] == 0.0  # nothing is earned twice


def _way(lake: list[str], start: tuple[int, int]) -> list[int]:
    waiting, seen = deque([(start, [])]), {start}
    while waiting:
        (row, column), path = waiting.popleft()
        if lake[row][column] == "G":
            return path
        for number, (down, right) in enumerate(((0, -1), (1, 0), (0, 1), (-1, 0))):
            cell = row + down, column + right
            inside = 0 <= cell[0] < len(lake) and 0 <= cell[1] < len(lake)
            if inside and cell not in seen and lake[cell[0]][cell[1]] != "H":
                seen.add(cell)
                waiting.append((cell, [*path, number]))
    raise AssertionError("no way")


def test_a_hole_ends_the_game_and_so_does_the_last_step() -> None:
    env = made("frozen_lake", is_slippery=False, max_steps=2)
    env.reset(seed=0)
    env.lake, env.player_pos = ["SFFF", "HFFF", "FFFF", "FFFG"], (0, 0)
    assert env.render() == "P___\nO___\n____\n___G"
    text, reward, terminated, truncated, _ = env.step("<answer>Down</answer>")
    assert (text, reward, terminated, truncated) == ("____\nX___\n____\n___G", 0.0, True, False)
    env.reset(seed=0)
    env.lake, env.player_pos = ["SFFF", "HFFF", "FFFF", "FFFG"], (0, 0)
    assert not env.step("<answer>Up</answer>")[4]["metrics"]["action_is_effective"]
    assert env.step("<answer>Right</answer>")[2:4] == (True, True)


def test_slippery_ice_leads_to_either_side_a_third_of_the_time() -> None:
    env = made("frozen_lake", size=3, max_steps=10**6)
    env.reset(seed=4)
    env.lake, ends = ["FFF", "FSF", "FFG"], []
    for _ in range(3000):
        env.player_pos = (1, 1)
        env.step("<answer>Right</answer>")
        ends.append(env.player_pos)
    assert {end: round(ends.count(end) / 3000, 1) for end in set(ends)} == {(1, 2): 0.3, (0, 1): 0.3, (2, 1): 0.3}


def test_a_map_seed_is_that_of_a_reset_without_one() -> None:
    one, two = made("frozen_lake", map_seed=9), made("frozen_lake")
    assert one.reset()[0] == one.reset()[0] == two.reset(seed=9)[0]


def call(direction: Any, name: str = "move_player", arguments: Any = None) -> dict[str, Any]:
    given = json.dumps({"direction": direction}) if arguments is None else arguments
    return {"id": f"call_{direction}", "type": "function", "function": {"name": name, "arguments": given}}


def test_tool_calls_move_the_player_and_are_all_answered() -> None:
    env = made("sokoban_tool_call", full_history=True, max_steps=30)
    messages, info = env.reset(seed=6)
    assert [message["role"] for message in messages] == ["system", "user"]
    [tool] = info["tools"]
    assert tool["function"]["parameters"]["properties"]["direction"]["enum"] == ["up", "down", "left", "right"]
    path, total = solution(env.room), 0.0
    sampled = {"role": "assistant", "content": None, "tool_calls": [call(WORDS[n - 1].lower()) for n in path]}
    before, (messages, total, terminated, truncated, info) = messages, env.step(sampled)
    assert len(before) == 2 and messages[2] == sampled  # as it was sampled; the list of before stays
    assert [message["role"] for message in messages[3:]] == ["tool"] * len(path)
    assert [message["tool_call_id"] for message in messages[3:]] == [each["id"] for each in sampled["tool_calls"]]
    assert total == pytest.approx(11 - 0.1 * len(path)) and (terminated, truncated) == (True, False)
    assert info["metrics"]["success"] and "√" in messages[-1]["content"]


@pytest.mark.parametrize(
    "wrong",
    [
        *(call("invalid"), call(5), call("up", name="jump"), call("up", arguments="{"), call("up", arguments="[1]")),
        *({"id": "x"}, {"id": "y", "function": "up"}),
    ],
)
@pytest.mark.parametrize("full_history", [True, False])
def test_a_wrong_call_costs_its_penalty_and_leaves_the_history_if_asked(full_history: bool, wrong: Any) -> None:
    env = made("sokoban_tool_call", full_history=full_history, format_penalty=-0.2, max_steps=4)
    first, _ = env.reset(seed=6)
    messages, reward, terminated, _, info = env.step({"role": "assistant", "content": "", "tool_calls": [wrong]})
    assert (reward, terminated, info["metrics"]["action_is_valid"]) == (-0.2, False, False)
    roles = [message["role"] for message in messages[2:]]
    assert roles == (["user"] if full_history else ["assistant", "tool"])
    assert messages[:2] == first and ("Error" in messages[-1]["content"]) is not full_history
    # A text is no action; every message is a step.
    messages, reward, *_ = env.step("<answer>Up</answer>")
    assert messages[-2] == {"role": "assistant", "content": "<answer>Up</answer>"} and reward == pytest.approx(-0.3)
    assert "move_player" in messages[-1]["content"]
    assert env.step({"tool_calls": [wrong]})[2:4] == (False, False)
    assert env.step({"tool_calls": [wrong]})[2:4] == (True, True)


def test_the_native_game_keeps_its_messages_and_ends_when_a_manager_says_why() -> None:
    why = Enum("why", ["MAX_LENGTH"])
    env = made("sokoban_native_env", system_template="You play.", observation_suffix="Go.", max_steps=5)
    messages, info = env.reset(seed=2)
    assert messages[0]["content"].startswith("You play.\n\n") and messages[1]["content"].endswith("Go.")
    assert info["tools"] == [] and info["env_instruction"] in messages[0]["content"]
    messages, reward, terminated, truncated, info = env.step("<answer>Up</answer>")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert not (terminated or truncated) and info["metrics"]["raw_reward"] == reward
    again, reward, terminated, truncated, info = env.step(why.MAX_LENGTH)
    assert (again, reward, terminated, truncated) == (messages, 0.0, True, True)
    assert info["stop_reason"] == "MAX_LENGTH" and info["metrics"]["success"] is False
    assert len(env.reset(seed=2)[0]) == 2


@pytest.mark.parametrize(
    ("env_type", "config", "said"),
    [
        ("sokoban", {"dim_rom": [6, 6]}, "did you mean 'dim_room'"),
        ("sokoban", {"render_mode": "human"}, "shown as text or rgb_array; render_mode is 'human'"),
        ("sokoban_native_env", {"render_mode": "rgb_array"}, "shown as text; render_mode is 'rgb_array'"),
        ("frozen_lake", {"cell_pixels": 4}, "a cell has at least 8"),
        ("sokoban", {"action_lookup": {5: "Jump"}}, "action_lookup"),
        ("frozen_lake", {"slippery": False}, "did you mean 'is_slippery'"),
        ("frozen_lake", {"action_lookup": {4: "Jump"}}, "action_lookup"),
        ("sokoban_tool_call", {"full": True}, "no parameter 'full'"),
    ],
)
def test_parameters_that_a_game_does_not_have_are_refused(env_type: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        made(env_type, **config)
    made("sokoban", tool_call_parser="qwen25", trajectory_mode="traj", mode="val")  # those of runners and managers pass


def test_what_cannot_be_drawn_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="no room of 4x4 with 3 boxes"):
        made("sokoban", dim_room=[4, 4], num_boxes=3).reset(seed=0)
    with pytest.raises(InvalidRequest, match="at least 4x4"):
        made("sokoban", dim_room=[3, 3], num_boxes=1).reset(seed=0)
    monkeypatch.setattr("tokengrove.roll.envs.frozen_lake._TRIES", 1)
    with pytest.raises(InvalidRequest, match="take a larger p"):
        generate_map(random.Random(0), 9, 0.0)
    with pytest.raises(InvalidRequest, match="call reset first"):
        made("sokoban").step("<answer>Up</answer>")
    with pytest.raises(InvalidRequest, match="call reset first"):
        made("frozen_lake").step("<answer>Up</answer>")


def test_a_game_that_somebody_registered_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    from gem.envs.registration import ENV_REGISTRY

    monkeypatch.setattr("gem.envs.registration.ENV_REGISTRY", ENV_REGISTRY)
    monkeypatch.delitem(ENV_REGISTRY, "sokoban", raising=False)
    gem = register_games()
    theirs, ours = object(), ENV_REGISTRY["sokoban"]
    assert type(gem.make("sokoban")).__name__ == "SokobanEnv"
    monkeypatch.setitem(ENV_REGISTRY, "sokoban", theirs)
    register_game("sokoban")
    register_game("unknown")
    assert ENV_REGISTRY["sokoban"] is theirs and ours is not theirs and "unknown" not in ENV_REGISTRY


@pytest.mark.parametrize("env_type", ["webshop", "roll_math", "sokoban_mcp", "rock_tb_native_env"])
def test_an_environment_that_only_roll_has_is_refused_with_the_way_out(
    env_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gem.envs.registration import ENV_REGISTRY

    with pytest.raises(InvalidRequest, match=rf"ROLL's own package.*gem.register\('{env_type}'") as refused:
        made(env_type)
    assert refused.value.param == "env_type"
    monkeypatch.setitem(ENV_REGISTRY, env_type, ENV_REGISTRY["game:GuessTheNumber-v0-easy"])
    made(env_type)


@pytest.mark.wide
def test_the_package_is_light_and_leaves_the_root_logger_as_it_is() -> None:
    code = """
import logging, sys
import tokengrove.roll.envs as envs
assert "gem" not in sys.modules
from tokengrove.roll.envs import SokobanEnv, gem
assert SokobanEnv(num_boxes=1).reset(seed=1)[0] == gem.make("sokoban", num_boxes=1).reset(seed=1)[0]
assert not logging.getLogger().handlers and logging.getLogger().level == logging.WARNING
try:
    envs.Sokobann
except AttributeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no attribute 'Sokobann'" in run.stdout
    assert logging.getLogger().name == "root"
