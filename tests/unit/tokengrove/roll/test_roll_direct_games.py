"""ROLL's direct managers on environments of gem and on ROLL's own games, on an application of this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.app import build_app
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.settings import Settings
from tests.support import call_text, default_url, function_tool, says, tiny_renderer, tool_result, user
from tests.unit.tokengrove.roll.roll_queues import Queue
from tokengrove.client import Client
from tokengrove.roll import (
    AgentNativeStepEnvManager,
    DataProto,
    Section,
    StepEnvManager,
    TrajEnvManager,
)

pytest.importorskip("gem")
pytest.importorskip("gymnasium")

LENGTH = 2048
GUESSING = {
    "env_type": "game:GuessTheNumber-v0",
    "agent_system_template": "You play.",
    "agent_template": "{observation}",
    "config": {"min_number": 1, "max_number": 20, "max_turns": 4},
}
SOKOBAN = {"dim_room": [6, 6], "num_boxes": 1, "max_steps": 10, "format_penalty": -0.15}


@contextmanager
def client_of(folder: Path, *answers: str) -> Iterator[Client]:
    """A client of a server that says these answers, in order."""
    engine = ScriptedEngine(says(*answers), vocab_size=tiny_renderer().vocab_size)
    app = build_app(Settings(database_url=default_url(folder), migrate=True), engine=engine, renderer=tiny_renderer())
    with Client(app=app) as client:
        yield client


def played(client: Client, kind: Any, config: dict[str, Any]) -> DataProto:
    entry = {**{"tag": "Game", "group_id": 0, "env_id": 0, "group_seed": 1, "max_steps": 3}, **config}
    queue = Queue(1)
    manager = kind(
        worker_config=Section(generating_args={"max_new_tokens": 64}),
        pipeline_config=Section(exp_name="exp", sequence_length=LENGTH, custom_envs={"Game": entry}),
        env_config=entry,
        generate_scheduler=client,
        output_queue=queue,
    )
    manager.run_rollout_loop(DataProto(meta_info={"seed": 2}))
    [rollout] = queue.rollouts
    tree = client.session_tree(rollout.meta_info["session_id"])
    assert tree.outcome == "Finished", tree.extra["exit_reason"]
    return rollout


def texts(client: Client, rollout: DataProto) -> list[str]:
    rows = zip(rollout.batch["input_ids"], rollout.batch["attention_mask"], strict=True)
    return [client.detokenize(ids[mask == 1]) for ids, mask in rows]


def test_a_game_of_gem_is_played_and_its_seed_is_its_number(tmp_path: Path) -> None:
    answers = [f"\\boxed{{{number}}}" for number in (1, 20, 10)]
    with client_of(tmp_path, *answers, *answers) as client:
        rollout = played(client, TrajEnvManager, GUESSING)
        again = played(client, TrajEnvManager, GUESSING)
        [text] = texts(client, rollout)
        assert texts(client, again) == [text]
    assert "between 1 and 20" in text
    assert [text.count(f"assistant\n<think>\n\n</think>\n\n{answer}<|im_end|>") for answer in answers] == [1, 1, 1]
    assert len(rollout.non_tensor_batch["step_scores"][0]) == 3
    assert "lower than 20" in text or "higher than 1" in text


def test_a_tool_of_the_wrapper_answers_in_the_role_tool(tmp_path: Path) -> None:
    tools = {
        "wrapper_args": {"tool_reward": 0.0, "tool_success_reward": 0.25, "max_tool_uses": 1},
        "tool_configs": [{"tool_id": "python_code", "tool_args": {"timeout": 20}}],
    }
    with client_of(tmp_path, "<code>print(20 + 3)</code>", "\\boxed{3}", "\\boxed{4}") as client:
        rollout = played(client, TrajEnvManager, {**GUESSING, "tool_wrapper": tools})
        [text] = texts(client, rollout)
    answered = text.split("<code>print(20 + 3)</code><|im_end|>\n")[1]
    assert answered.startswith("<|im_start|>user\n<tool_response>\n")
    assert "23" in answered.split("</tool_response>")[0]
    assert rollout.non_tensor_batch["step_scores"][0][0] == 0.25
    assert rollout.meta_info["metrics"]["env/Game/tool_use_counter"] == 1.0


def test_steps_in_sokoban_are_samples_with_rewards_and_states_of_their_own(tmp_path: Path) -> None:
    config = {
        "env_type": "sokoban",
        "agent_system_template": "You play.",
        "agent_template": "{env_instruction} {history} {current_observation}",
        "history_length": 2,
        "use_thread_lock": True,
        "config": SOKOBAN,
    }
    with client_of(tmp_path, "nothing", "<answer>Up</answer>", "<answer>Down</answer>") as client:
        rollout = played(client, StepEnvManager, config)
        prompts = texts(client, rollout)
    assert len(rollout) == 3
    scores, states = (rollout.non_tensor_batch[name].tolist() for name in ("step_scores", "state_hash"))
    assert scores[0] < scores[1] < 0
    assert states[0] == states[1]  # an answer without an action leaves the room as it was
    assert "action:  (this action was not valid" in prompts[1]  # of which the room understood nothing
    assert "was not valid" not in prompts[2]
    assert rollout.meta_info["metrics"]["env/Game/action_is_valid"] == pytest.approx(2 / 3)


def test_the_native_sokoban_is_one_conversation_and_decides_when_it_ends(tmp_path: Path) -> None:
    config = {"env_type": "sokoban_native_env", "max_steps": 3, "config": {**SOKOBAN, "max_steps": 3}}
    answers = ["<answer>Up</answer>", "nothing", "<answer>Left</answer>"]
    with client_of(tmp_path, *answers) as client:
        rollout = played(client, AgentNativeStepEnvManager, config)
        rows = texts(client, rollout)
        tree = client.session_tree(rollout.meta_info["session_id"])
    assert [node.reason for node in tree.interactions] == ["first", "continued", "continued"]
    assert rows[2].startswith(rows[1]) and rows[1].startswith(rows[0])
    assert "<|im_end|><|im_end|>" not in rows[2]


class Walk:
    """Owns the messages, reads the calls in the answers itself, and ends after two of them."""

    def reset(self, seed: int | None = None) -> tuple[list[Any], dict[str, Any]]:
        self.calls = 0
        self.messages: list[Any] = [user("walk")]
        return self.messages, {"tools": [function_tool("move", {"to": {"type": "string"}})]}

    def step(self, action: str) -> tuple[list[Any], float, bool, bool, dict[str, Any]]:
        called = json.loads(action.split("<tool_call>")[1].split("</tool_call>")[0])
        function = {"name": called["name"], "arguments": called["arguments"]}
        call_id = f"walk_{self.calls}"
        self.calls += 1
        answer = {"role": "assistant", "content": action.split("<tool_call>")[0].strip()}
        self.messages.append({**answer, "tool_calls": [{"id": call_id, "type": "function", "function": function}]})
        self.messages.append(tool_result(call_id, f"you are at {self.calls}"))
        return self.messages, 1.0, self.calls == 3, False, {}


class Walking(AgentNativeStepEnvManager):
    def _make_environment(self) -> Any:
        return Walk()


def test_calls_that_the_environment_has_read_are_continued_token_by_token(tmp_path: Path) -> None:
    calls = [call_text("move", f'{{"to":   "{place}"}}') for place in ("north", "east", "south")]
    with client_of(tmp_path, calls[0], f"On I go.\n{calls[1]}", calls[2]) as client:
        rollout = played(client, Walking, {})
        rows = texts(client, rollout)
        tree = client.session_tree(rollout.meta_info["session_id"])
    assert [node.reason for node in tree.interactions] == ["first", "continued", "continued"]
    assert all(call in rows[2] for call in calls)  # with the white space that the model wrote
    assert "<tool_response>\nyou are at 2\n</tool_response>" in rows[2]
    assert '"name": "move"' in rows[0]
