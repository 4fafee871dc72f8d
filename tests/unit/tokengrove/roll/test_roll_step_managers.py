"""ROLL's step managers on a live server: prompts that stand for themselves, a sample for each step, states by hash."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import orjson
import pytest

from tests.support import function_tool, real_server
from tests.unit.tokengrove.roll.roll_queues import Queue
from tokengrove.client import Client
from tokengrove.roll import DataProto, Section
from tokengrove.roll.managers import (
    AgentNativeStepEnvManager,
    RolloutCache,
    StepConcatEnvManager,
    StepEnvManager,
)
from tokengrove.roll.values import EpisodeStopReason, compute_object_hash

gem = pytest.importorskip("gem")

LENGTH = 640
TEMPLATE = (
    "{env_instruction} {current_observation}\n{step_count} steps, now {current_step}. "
    "Recent {history_length}: [{history}]. At most {max_response_length}."
)
NO_THOUGHTS = "<think>\n\n</think>\n\n"

gem.register("roll-test:Counting-v1", "tests.unit.tokengrove.roll.roll_games:Counting")
gem.register("roll-test:Talking-v1", "tests.unit.tokengrove.roll.roll_games:Talking")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of an open server, whose model does what the conversation tells it."""
    with real_server(tmp_path_factory.mktemp("open"), engine_arg=("play=agent",)) as url, Client(url) as client:
        yield client


def played(client: Client, kind: Any, env: Any = None, **more: Any) -> tuple[Any, list[DataProto]]:
    name = "Talking" if issubclass(kind, AgentNativeStepEnvManager) else "Counting"
    entry = {
        **{"env_type": f"roll-test:{name}-v1", "tag": "Count", "group_id": 3, "env_id": 7, "group_seed": 11},
        **{"max_steps": 10, "max_tokens_per_step": 64, "config": env or {}, "history_length": 2},
        **{"agent_system_template": "You count.", "agent_template": TEMPLATE},
    }
    episodes, length = more.pop("episodes", 1), more.pop("sequence_length", LENGTH)
    entry |= more
    queue = Queue(episodes)
    manager = kind(
        worker_config=Section(generating_args={"max_new_tokens": 32}),
        pipeline_config=Section(exp_name="exp", sequence_length=length, custom_envs={"Count": entry}),
        env_config=entry,
        generate_scheduler=client,
        output_queue=queue,
    )
    manager.reset_backoff_s = 0.0
    manager.run_rollout_loop(DataProto(meta_info={"seed": 100}))
    return manager, queue.rollouts


def remembering(kind: Any) -> Any:
    """The manager, which keeps the histories of its episodes."""

    class Remembering(kind):  # type: ignore[misc]
        def formulate_rollouts(self, rollout_cache: RolloutCache) -> DataProto:
            self.histories = [*getattr(self, "histories", ()), rollout_cache.history]
            return super().formulate_rollouts(rollout_cache)  # type: ignore[no-any-return]

    return Remembering


def prompts_of(client: Client, rollout: DataProto) -> list[str]:
    """The prompt of each row, as text."""
    return [client.detokenize(ids[mask]) for ids, mask in zip(*of(rollout, "input_ids", "prompt_mask"), strict=True)]


def of(rollout: DataProto, *names: str) -> list[Any]:
    return [rollout.batch[name] for name in names]


def test_every_step_is_a_row_with_the_tokens_and_the_reward_of_its_history(client: Client) -> None:
    manager, [rollout] = played(client, remembering(StepEnvManager))
    [history] = manager.histories
    assert len(rollout) == len(history) == 3
    for row, entry in enumerate(history):
        prompt, response = entry["prompt_ids"], entry["response_ids"]
        count = len(prompt) + len(response)
        assert rollout.batch["input_ids"][row, :count].tolist() == [*prompt, *response]
        assert rollout.batch["attention_mask"][row].sum() == count
        assert rollout.batch["response_mask"][row].nonzero()[0].tolist() == list(range(len(prompt), count))
        logprobs = rollout.batch["infer_logprobs"][row, len(prompt) - 1 : count - 1]
        assert logprobs.tolist() == pytest.approx(entry["infer_logprobs"])
        assert rollout.batch["scores"][row].nonzero()[0].tolist() == [count - 1]
    names = {name: column.tolist() for name, column in rollout.non_tensor_batch.items()}
    assert (names["step"], names["step_scores"]) == ([0, 1, 2], [1.0, 2.0, 3.0])
    assert names["episode_scores"] == [6.0] * 3
    assert len(set(names["traj_id"])) == len(set(names["traj_group_id"])) == 1
    assert names["state_hash"] == [compute_object_hash(entry["observation"]) for entry in history]
    assert [len(orjson.loads(text)) for text in names["messages"]] == [3, 3, 3]
    metrics = rollout.meta_info["metrics"]
    assert (metrics["env/Count/num_actions"], metrics["env/Count/right"]) == (3, 3.0)


def test_a_prompt_stands_for_itself_and_knows_the_window_of_recent_steps(client: Client) -> None:
    manager, [rollout] = played(client, remembering(StepEnvManager), env={"length": 4}, history_length=3)
    [history] = manager.histories
    answers = [entry["llm_response"].removesuffix("<|im_end|>") for entry in history]
    recent = ", ".join(
        f"(step: {step}, observation: Say exactly: <answer>{110 + step}</answer>, "
        f"action: {answers[step - 1]}, reward: {step}.0)"
        for step in (2, 3)
    )
    assert prompts_of(client, rollout)[3] == (
        "<|im_start|>system\nYou count.<|im_end|>\n<|im_start|>user\nCount. Say exactly: <answer>114</answer>\n"
        f"3 steps, now 4. Recent 2: [{recent}]. At most 64.<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHTS}"
    )
    for window in (None, 0, 1):
        _, [rollout] = played(client, StepEnvManager, env={"length": 2}, history_length=window)
        assert "now 2. Recent 0: []. At" in prompts_of(client, rollout)[1]


def test_a_prompt_says_which_of_the_recent_actions_were_not_valid(client: Client) -> None:
    class Wrong(StepEnvManager):
        def _action(self, llm_output: DataProto) -> Any:
            assert self.rollout_cache is not None
            return "up" if self.rollout_cache.step == 0 else super()._action(llm_output)

    _, [rollout] = played(client, Wrong, env={"length": 3}, history_length=3)
    last = prompts_of(client, rollout)[2]
    assert "action: up (this action was not valid" in last
    assert last.count("not valid") == 1
    assert rollout.non_tensor_batch["step_scores"].tolist() == [0.0, 2.0, 3.0]


def test_observations_are_concatenated_line_by_line(client: Client) -> None:
    template = "{current_observation}\n{history}"
    manager, [rollout] = played(
        client, remembering(StepConcatEnvManager), agent_template=template, history_length=3, agent_system_template=None
    )
    current = "Say exactly: <answer>113</answer>\nafter 2"
    earlier = "Say exactly: <answer>111</answer>\nSay exactly: <answer>112</answer>"
    text = f"<|im_start|>user\n{current}\n{earlier}<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHTS}"
    assert prompts_of(client, rollout)[2] == text
    assert rollout.non_tensor_batch["state_hash"][2] == compute_object_hash(current)
    assert rollout.non_tensor_batch["step_scores"].tolist() == [1.0, 2.0, 3.0]
    assert [entry["messages"][-1]["role"] for entry in manager.histories[0]] == ["assistant"] * 3


def test_the_states_and_rewards_of_the_steps_stand_in_the_tree(client: Client) -> None:
    _, [rollout] = played(client, StepEnvManager)
    tree = client.session_tree(rollout.meta_info["session_id"])
    turns = [client.show_turn(tree.session_id, node.id) for node in tree.interactions]
    assert [turn["state_hash"] for turn in turns] == rollout.non_tensor_batch["state_hash"].tolist()
    assert [turn["reward"] for turn in turns] == [1.0, 2.0, 3.0]


def test_an_environment_that_owns_the_messages_is_continued_token_by_token(client: Client) -> None:
    manager, [rollout] = played(client, remembering(AgentNativeStepEnvManager))
    [history] = manager.histories
    assert rollout.non_tensor_batch["step_scores"].tolist() == [1.0, 2.0, 3.0]
    for earlier, later in pairwise(history):
        known = [*earlier["prompt_ids"], *earlier["response_ids"]]
        assert later["prompt_ids"][: len(known)] == known
    text = prompts_of(client, rollout)[1]
    assert text.endswith(
        f"<|im_start|>assistant\n{NO_THOUGHTS}<answer>111</answer><|im_end|>\n<|im_start|>user\n"
        f"Say exactly: <answer>112</answer><|im_end|>\n<|im_start|>assistant\n{NO_THOUGHTS}"
    )
    assert rollout.non_tensor_batch["state_hash"].tolist() == [compute_object_hash(e["observation"]) for e in history]
    assert [len(entry["observation"]) for entry in history] == [2, 4, 6]
    tree = client.session_tree(rollout.meta_info["session_id"])
    assert [node.reason for node in tree.interactions] == ["first", "continued", "continued"]
    about = orjson.loads(rollout.non_tensor_batch["trajectory_data"][-1])
    assert about["reward_info"]["step_rewards"] == [1.0, 2.0, 3.0]
    assert about["env_info"]["level"] == 3
    assert about["failure_info"]["stop_reason"] == "FINISH"
    assert about["last_observation"][-1]["content"] == "Say exactly: <answer>114</answer>"
    metrics = rollout.meta_info["metrics"]
    assert metrics["env/Count/step_prompt_length_max"] == max(len(entry["prompt_ids"]) for entry in history)
    assert metrics["env/Count/traj_time_generate_sum"] > 0


def test_an_environment_that_rewrites_its_messages_is_rendered_anew(client: Client) -> None:
    _, [rollout] = played(client, AgentNativeStepEnvManager, env={"rewrites": True})
    prompts = prompts_of(client, rollout)
    assert len(prompts) == 3
    assert all(text.count("<|im_start|>user") == 1 for text in prompts)
    assert rollout.batch["response_mask"].any(axis=1).all()


def test_an_echo_of_an_earlier_answer_has_no_second_end_token(client: Client) -> None:
    class Changed(AgentNativeStepEnvManager):
        def _continued(self, history: Any, messages: Any) -> None:
            """Render anew, as if the template could not go on."""

    _, [rollout] = played(client, Changed)
    text = prompts_of(client, rollout)[2]
    assert text.count("<answer>111</answer><|im_end|>\n<|im_start|>user") == 1
    assert "<|im_end|><|im_end|>" not in text


def test_the_tools_of_the_environment_stand_in_prompt_and_batch(client: Client) -> None:
    tools = [function_tool("move", {"to": {"type": "string"}})]
    _, [rollout] = played(client, AgentNativeStepEnvManager, env={"tools": tools, "length": 1}, sequence_length=1024)
    assert '"name": "move"' in prompts_of(client, rollout)[0]
    assert orjson.loads(rollout.non_tensor_batch["tools"][-1])[0]["function"]["name"] == "move"


def test_the_environment_is_told_that_there_is_no_room_and_what_it_gives_is_kept(client: Client) -> None:
    manager, [rollout] = played(client, AgentNativeStepEnvManager, env={"length": 99, "text": "a long story " * 12})
    assert manager.env.actions[-1] is EpisodeStopReason.MAX_LENGTH
    count = len(rollout)
    rewards = [float(number) for number in range(1, count + 1)]
    assert rollout.non_tensor_batch["step_scores"].tolist() == [*rewards[:-1], rewards[-1] + 0.5]
    tree = client.session_tree(rollout.meta_info["session_id"])
    assert (tree.outcome, tree.extra["exit_reason"]) == ("Finished", "max_length")
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [sum(rewards) + 0.5] * count


def test_an_environment_that_failed_to_begin_leaves_a_row_to_be_dropped(client: Client) -> None:
    _, rollouts = played(client, AgentNativeStepEnvManager, env={"failed": True}, episodes=2)
    for rollout in rollouts:
        assert rollout.meta_info["drop_flag"] is True
        assert not rollout.batch["response_mask"].any()
        tree = client.session_tree(rollout.meta_info["session_id"])
        assert tree.outcome == "Failed"
        assert "no sandbox" in tree.extra["exit_reason"]
        assert "ENV_RESET_FAILED" in rollout.non_tensor_batch["trajectory_data"][-1]
