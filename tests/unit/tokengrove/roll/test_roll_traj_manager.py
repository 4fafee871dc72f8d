"""ROLL's TrajEnvManager on a live server: the direct loop, whose history, session and batch have the same tokens."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from proxy.engine.create import model_folder
from proxy.settings import Settings
from tests.support import real_server
from tests.unit.tokengrove.roll.roll_queues import Queue
from tokengrove.client import Client, ServerUnreachable, Session
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.roll import DataProto, Section
from tokengrove.roll.managers import (
    BaseLLMProxy,
    RolloutCache,
    StepEnvManager,
    TrajEnvManager,
    VLTrajEnvManager,
    compute_conversation_end_token_id,
    custom_apply_chat_template,
    register_llm_proxy,
)
from tokengrove.roll.managers.live_session import LiveSession
from tokengrove.roll.values import GenerateStopReason
from tokengrove.rollout import retries
from tokengrove.rollout.server_tokenizer import ServerTokenizer

gem = pytest.importorskip("gem")
torch = pytest.importorskip("torch")
AutoTokenizer = pytest.importorskip("transformers").AutoTokenizer

KEY = "a-key-of-the-administrator"
LENGTH = 512
SEED = DataProto(meta_info={"seed": 100})
FIRST = 111
"""The seed of the first episode: that of the run, and the group's 11."""
TEMPLATE = "Turn {turn_idx}, {actions_left} left, at most {max_response_length} tokens ({suffix}). {observation}"

gem.register("roll-test:Counting-v0", "tests.unit.tokengrove.roll.roll_games:Counting")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a server that asks for keys everywhere, whose model does what the conversation tells it."""
    settings: dict[str, Any] = {"engine_arg": ("play=agent",), "admin_key": KEY, "capacity_control": True}
    with real_server(tmp_path_factory.mktemp("keyed"), require_key=True, **settings) as url, Client(url, KEY) as client:
        yield client


def manager_of(
    client: Client,
    queue: Queue,
    kind: Any = TrajEnvManager,
    env: Any = None,
    proxy_type: str | None = None,
    **more: Any,
) -> Any:
    """A manager of a Counting game. `env`: parameters of the game; `more`: further keys of its entry."""
    entry = {
        **{"env_type": "roll-test:Counting-v0", "tag": "Count", "group_id": 3, "env_id": 7, "group_seed": 11},
        **{"max_steps": 10, "max_tokens_per_step": 64, "config": env or {}},
        **{"agent_system_template": "You count.", "agent_template": TEMPLATE},
    }
    length, lock = more.pop("sequence_length", LENGTH), more.pop("lock", None)
    entry |= more
    return kind(
        worker_config=Section(generating_args={"max_new_tokens": 32}, llm_proxy={"proxy_type": proxy_type}),
        pipeline_config=Section(exp_name="exp", sequence_length=length, custom_envs={"Count": entry}),
        env_config=entry,
        tokenizer=more.get("tokenizer"),
        generate_scheduler=client,
        output_queue=queue,
        thread_lock=lock or threading.Lock(),
    )


def played(client: Client, episodes: int = 1, **more: Any) -> tuple[Any, list[DataProto]]:
    queue = Queue(episodes)
    manager = manager_of(client, queue, **more)
    manager.reset_backoff_s = 0.0
    manager.update_step(4)
    manager.run_rollout_loop(SEED)
    return manager, queue.rollouts


def of_history(history: list[dict[str, Any]], name: str) -> list[float]:
    """A column of the whole episode, made of the history alone."""
    parts: list[float] = []
    for entry in history:
        prompt, response = entry["prompt_ids"], entry["response_ids"]
        if name == "input_ids":
            parts += [*prompt, *response]
        elif name == "response_mask":
            parts += [*[0] * len(prompt), *[1] * len(response)]
        else:
            parts += [*[0.0] * len(prompt), *entry["infer_logprobs"]]
    return parts


def text_of(client: Client, rollout: DataProto, row: int = 0) -> str:
    """The tokens of a row, without padding, as text."""
    return client.detokenize(rollout.batch["input_ids"][row][rollout.batch["attention_mask"][row] == 1])


class Remembering(TrajEnvManager):
    """Keeps the histories of its episodes."""

    def formulate_rollouts(self, rollout_cache: RolloutCache) -> DataProto:
        self.histories = [*getattr(self, "histories", ()), rollout_cache.history]
        return super().formulate_rollouts(rollout_cache)


def test_the_batch_of_an_episode_is_its_history_and_its_session_token_by_token(client: Client) -> None:
    manager, [rollout] = played(client, kind=Remembering)
    [history] = manager.histories
    assert [entry["reward"] for entry in history] == [1.0, 2.0, 3.0]
    ids = of_history(history, "input_ids")
    count = len(ids)
    assert rollout.batch["input_ids"][0, :count].tolist() == ids
    assert rollout.batch["attention_mask"][0].tolist() == [1] * count + [0] * (LENGTH - count)
    assert rollout.batch["response_mask"][0, :count].tolist() == of_history(history, "response_mask")
    logprobs = of_history(history, "infer_logprobs")
    assert rollout.batch["infer_logprobs"][0, : count - 1].tolist() == pytest.approx(logprobs[1:])
    prompt = len(history[0]["prompt_ids"])
    assert rollout.batch["prompt_mask"][0].tolist() == [True] * prompt + [False] * (LENGTH - prompt)
    assert rollout.batch["scores"][0].nonzero()[0].tolist() == [count - 1]
    assert rollout.batch["scores"].sum() == 6.0
    tree = client.session_tree(rollout.meta_info["session_id"])
    assert [(node.id, node.reward) for node in tree.interactions] == [
        (entry["interaction_id"], entry["reward"]) for entry in history
    ]
    known: list[int] = []
    for entry in history:
        turn = client.show_turn(tree.session_id, entry["interaction_id"], ["ids"])
        known += entry["prompt_ids"]
        assert turn["prompt_ids"] == known
        known += entry["response_ids"]
    assert (tree.outcome, tree.extra["exit_reason"]) == ("Finished", "finish")
    assert tree.extra["metadata"]["seed"] == FIRST


def test_the_conversation_is_that_of_the_template_with_no_token_rendered_again(client: Client) -> None:
    manager, [rollout] = played(client)
    text = text_of(client, rollout)
    no_thoughts = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert text == (
        "<|im_start|>system\nYou count.<|im_end|>\n<|im_start|>user\nCount.\n"
        "Turn 1, 10 left, at most 64 tokens (first). Say exactly: <answer>111</answer><|im_end|>\n"
        f"{no_thoughts}<answer>111</answer><|im_end|>\n<|im_start|>user\n"
        "Turn 2, 9 left, at most 64 tokens (after 1). Say exactly: <answer>112</answer><|im_end|>\n"
        f"{no_thoughts}<answer>112</answer><|im_end|>\n<|im_start|>user\n"
        "Turn 3, 8 left, at most 64 tokens (after 2). Say exactly: <answer>113</answer><|im_end|>\n"
        f"{no_thoughts}<answer>113</answer><|im_end|>"
    )
    assert manager.env.actions == [f"<answer>{number}</answer><|im_end|>" for number in (111, 112, 113)]


def test_what_is_put_has_the_names_and_numbers_of_the_episode(client: Client) -> None:
    queue = Queue(2)
    manager = manager_of(client, queue)
    manager.update_step(4)
    manager.run_rollout_loop(SEED)
    assert [put[:3] + put[4:] for put in queue.puts] == [(3, 0, 4, 7), (3, 1, 4, 7), (3, None, 4, 7)]
    first, second = queue.rollouts
    names = {name: column.tolist() for name, column in first.non_tensor_batch.items()}
    assert (names["env_ids"], names["group_ids"], names["tags"]) == ([7], [3], ["Count"])
    assert (names["step_scores"], names["episode_scores"]) == ([[1.0, 2.0, 3.0]], [6.0])
    assert names["traj_group_id"] == ["Count_3_0_111"]
    assert names["traj_id"][0].startswith("Count_3_0_111_7")
    assert names["traj_id"] != second.non_tensor_batch["traj_id"].tolist()
    messages = orjson.loads(names["messages"][0])
    assert [each["role"] for each in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert messages[-1]["content"] == "<answer>113</answer>"
    metrics = first.meta_info["metrics"]
    assert (metrics["env/Count/right"], metrics["env/Count/action_is_valid"]) == (3.0, 1.0)
    assert metrics["env/Count/num_actions"] == 3
    assert metrics["env/response_length"] == first.batch["response_mask"].sum()
    assert manager.env.seeds == [FIRST, FIRST + 1]


def test_an_episode_ends_after_max_steps(client: Client) -> None:
    _, [rollout] = played(client, env={"length": 9}, max_steps=2)
    tree = client.session_tree(rollout.meta_info["session_id"])
    assert (len(tree.interactions), tree.extra["exit_reason"]) == (2, "max_steps")
    assert tree.extra["metrics"]["truncated"] is True
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [3.0]


def test_an_episode_ends_where_its_prompt_leaves_no_room(client: Client) -> None:
    _, [rollout] = played(client, env={"length": 9, "text": "a long story " * 12}, sequence_length=300)
    tree = client.session_tree(rollout.meta_info["session_id"])
    assert (tree.outcome, tree.extra["exit_reason"]) == ("Finished", "max_length")
    rewards = [float(number) for number in range(1, len(tree.interactions) + 1)]
    assert rollout.non_tensor_batch["step_scores"].tolist() == [rewards]
    assert rollout.batch["input_ids"].shape == (1, 300)
    _, [empty] = played(client, sequence_length=10)
    assert not empty.batch["response_mask"].any()
    assert len(empty) == 1


@pytest.mark.parametrize(("place", "kept"), [("reset", []), ("step 0", [0.0]), ("step 2", [1.0, 2.0, 0.0])])
def test_an_episode_whose_environment_breaks_keeps_what_it_earned_and_the_loop_goes_on(
    client: Client, place: str, kept: list[float]
) -> None:
    manager, rollouts = played(client, episodes=2, env={"breaks": [place]})
    assert len(rollouts) == 2
    for rollout in rollouts:
        tree = client.session_tree(rollout.meta_info["session_id"])
        assert tree.outcome == "Failed"
        assert f"the game broke at {place}" in tree.extra["exit_reason"]
        assert [node.reward or 0.0 for node in tree.interactions] == kept
        assert rollout.batch["response_mask"].any() == bool(kept)
        assert rollout.meta_info.get("drop_flag", False) == (not kept)
    assert manager.env.seeds == [FIRST, FIRST + 1]


def test_a_failed_inference_fails_the_episode_and_the_loop_goes_on(client: Client) -> None:
    class Broken(TrajEnvManager):
        def make_decision(self, rollout_cache: RolloutCache) -> DataProto:
            if rollout_cache.step == 1 and self.episode_id == 0:
                self.session().generate([1, 2], sampling_params={"temperature": -1})
            return super().make_decision(rollout_cache)

        def session(self) -> Any:
            assert self.episode is not None
            return self.episode.session

    _, rollouts = played(client, episodes=2, kind=Broken)
    outcomes = [client.session_tree(rollout.meta_info["session_id"]).outcome for rollout in rollouts]
    assert outcomes == ["Failed", "Finished"]
    assert rollouts[0].non_tensor_batch["step_scores"].tolist() == [[1.0]]


def test_nothing_to_play_ends_the_loop_and_the_session_says_so(client: Client) -> None:
    queue = Queue(5)
    manager = manager_of(client, queue)
    manager.env.reset = lambda seed: (None, {})
    manager.run_rollout_loop(SEED)
    assert queue.rollouts == []
    [session] = client.sessions({"metadata": {"tag": "Count"}, "outcome": "NoData"})
    assert client.session_tree(session["session_id"]).interactions == ()


def test_a_stopped_manager_ends_its_session_and_plays_no_more(client: Client) -> None:
    queue = Queue(5)
    manager = manager_of(client, queue)
    step, outcomes = manager.env.step, list[Any]()

    def stopping(action: Any) -> Any:
        threading.Thread(target=manager.stop).run()
        outcomes.append(manager.episode.outcome)
        return step(action)

    manager.env.step = stopping
    before = {each["session_id"] for each in client.sessions()}
    manager.run_rollout_loop(SEED)
    assert queue.rollouts == [] and outcomes == ["Failed"]  # at once, before the step has ended
    assert manager.tokenizer.decode(manager.tokenizer.encode("still there")) == "still there"
    with pytest.raises(RuntimeError, match="no episode is running"):
        manager.llm_proxy.generate_scheduler.generate([1])
    [left] = [each for each in client.sessions() if each["session_id"] not in before]
    assert (left["status"], left["outcome"]) == ("ended", "Failed")


def test_every_step_may_be_overridden_and_the_mask_changed_token_by_token(client: Client) -> None:
    class LastOnly(TrajEnvManager):
        """Trains the last turn only, and shows a shorter prompt."""

        def format_messages(self, history: RolloutCache) -> DataProto:
            content = history.history[-1]
            messages = [{"role": "user", "content": f"Now! {content['observation']}"}]
            content["state_hash"] = "a-state"
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
            return DataProto({"input_ids": [ids]})

        def step(self, llm_output: DataProto) -> RolloutCache:
            cache = super().step(llm_output)
            cache.history[-2]["reward"] *= 10
            return cache

        def formulate_rollouts(self, rollout_cache: RolloutCache) -> DataProto:
            rollout = super().formulate_rollouts(rollout_cache)
            rollout.batch["response_mask"][:-1] = False
            return rollout

    _, [rollout] = played(client, kind=LastOnly)
    assert [int(mask.any()) for mask in rollout.batch["response_mask"]] == [0, 0, 1]  # prompts that continue nothing
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [60.0] * 3
    assert rollout.non_tensor_batch["state_hash"].tolist() == ["a-state"] * 3
    texts = [
        client.detokenize(ids[mask == 1])
        for ids, mask in zip(*(rollout.batch[n] for n in ("input_ids", "attention_mask")), strict=True)
    ]
    answers = [text.split("assistant\n")[1] for text in texts]
    assert answers == [f"<answer>{number}</answer><|im_end|>" for number in (111, 112, 113)]


class Ported(TrajEnvManager):
    """Its methods as they are written for ROLL: with tensors, without a word of sessions and turns."""

    def make_decision(self, rollout_cache: RolloutCache) -> DataProto:
        lm_input = self.format_messages(rollout_cache)
        lm_input.batch["input_ids"] = torch.tensor(lm_input.batch["input_ids"])
        lm_input.meta_info["src_rank"] = self.env_config["env_id"]
        lm_output = self.llm_proxy.generate(
            messages=[], lm_input=lm_input, generation_config={"max_new_tokens": 20, "temperature": 1.0}
        )
        assert lm_output is not None
        content = rollout_cache.history[-1]
        content["response_ids"] = lm_output.batch["responses"][0].tolist()
        content["infer_logprobs"] = lm_output.batch["infer_logprobs"][0].tolist()
        answer = self.tokenizer.decode(content["response_ids"], skip_special_tokens=True)
        content["messages"].append({"role": "assistant", "content": answer})
        return DataProto(
            {"responses": torch.tensor(lm_output.batch["responses"])},
            meta_info={"stop_reason": GenerateStopReason.FINISH},
        )

    def formulate_rollouts(self, rollout_cache: RolloutCache) -> DataProto:
        if "observation" in rollout_cache.history[-1]:
            rollout_cache.history.pop(-1)
        ids = [token for entry in rollout_cache.history for token in entry["prompt_ids"] + entry["response_ids"]]
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[0, -1] = True
        batch = {"input_ids": torch.tensor([ids]), "response_mask": mask}
        return DataProto(batch, {"tags": np.array(["Count"], dtype=object)}, {"metrics": {}})


def test_methods_that_were_written_for_roll_run_as_they_are(client: Client) -> None:
    _, rollouts = played(client, episodes=2, kind=Ported)
    for episode, rollout in enumerate(rollouts):
        tree = client.session_tree(rollout.meta_info["session_id"])
        assert tree.outcome == "Finished"
        assert [node.reward for node in tree.interactions] == [1.0, 2.0, 3.0]
        [sample] = client.export(session_id=tree.session_id).samples
        assert rollout.batch["input_ids"][0].tolist() == sample.input_ids.tolist()
        assert rollout.batch["response_mask"].sum() == 1
        names = {name: column.tolist() for name, column in rollout.non_tensor_batch.items()}
        group = f"Count_3_{episode}_111"
        assert names == {"tags": ["Count"], "traj_group_id": [group], "traj_id": [f"{group}_7"]}


def test_helpers_of_rolls_prompts_render_with_the_servers_tokenizer_and_ones_own(client: Client) -> None:
    question, prompt = [{"role": "user", "content": "hi"}], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    own = AutoTokenizer.from_pretrained(str(model_folder(Settings())))
    for tokenizer in (ServerTokenizer(client), own):
        asked = custom_apply_chat_template(question, tokenizer)
        assert tokenizer.decode(asked) == f"{prompt}<think>\n\n</think>\n\n"
        assert tokenizer.decode(custom_apply_chat_template(question, tokenizer, enable_thinking=True)) == prompt
        assert custom_apply_chat_template(question, tokenizer, skip_mock_system_prompt=True) == asked
        assert custom_apply_chat_template([], tokenizer) == []
        with_system = custom_apply_chat_template([{"role": "system", "content": "s"}, *question], tokenizer)
        assert tokenizer.decode(with_system).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user")
        assert tokenizer.decode(compute_conversation_end_token_id(tokenizer)) == "<|im_end|>"


def test_a_formulation_of_ones_own_that_cannot_take_a_failed_history_is_not_asked_to(client: Client) -> None:
    _, [rollout] = played(client, kind=Ported, env={"breaks": ["reset"]})
    assert rollout.meta_info["drop_flag"] is True
    with pytest.raises(ZeroDivisionError):
        played(client, kind=type("Wrong", (TrajEnvManager,), {"formulate_rollouts": lambda self, cache: 1 / 0}))
    assert {session["status"] for session in client.sessions()} == {"ended"}


def test_an_environment_that_leaves_with_the_agent_fails_one_episode(client: Client) -> None:
    manager = manager_of(client, queue := Queue(2))
    step = manager.env.unwrapped.step

    def leaving(action: Any) -> Any:
        return sys.exit(3) if "111" in action else step(action)

    manager.env.unwrapped.step = leaving
    manager.run_rollout_loop(SEED)
    outcomes = [client.session_tree(rollout.meta_info["session_id"]).outcome for rollout in queue.rollouts]
    assert outcomes == ["Failed", "Finished"]


def test_the_environment_is_closed_when_its_manager_is_gone(client: Client) -> None:
    closed: list[str] = []
    manager = manager_of(client, Queue(1))
    manager.env.unwrapped.close = lambda: closed.append("closed")
    manager.run_rollout_loop(SEED)
    assert closed == []
    del manager
    gc.collect()
    assert closed == ["closed"]


def test_the_environment_is_used_under_the_lock_of_its_worker_and_within_its_limit(client: Client) -> None:
    lock = threading.Lock()
    manager = manager_of(client, Queue(1), use_thread_lock=True, max_env_step_concurrent=1, lock=lock)
    held: list[bool] = []
    game = manager.env.unwrapped
    step = game.step

    def watched(action: Any) -> Any:
        held.append(lock.locked() and not manager.env_step_limiter.acquire(blocking=False))
        return step(action)

    game.step = watched
    manager.run_rollout_loop(SEED)
    assert held == [True] * 3
    assert not lock.locked()


def test_a_loop_of_ones_own_may_lead_several_agents(client: Client) -> None:
    class Debate(TrajEnvManager):
        """Two agents answer one question; their answers are turns of one session, each marked with its agent."""

        def run_rollout_loop(self, data: DataProto) -> None:
            self.begin(data)
            while (cache := self.reset()) is not None:
                question = cache.history.pop()
                for agent in ("planner", "critic"):
                    cache.history.append({**question, "agent": agent})
                    output = self.make_decision(cache)
                    assert output.meta_info.pop("stop_reason") is GenerateStopReason.FINISH
                    cache.history[-1]["reward"] = 1.0 if agent == "critic" else 0.5
                rollout = self.formulate_rollouts(cache)
                assert "planner" in self.tokenizer.decode(rollout.batch["input_ids"][0])  # though the session has ended
                self.put(rollout)
            self.put(None)

        def format_messages(self, history: RolloutCache) -> DataProto:
            content = history.history[-1]
            messages = [{"role": "user", "content": f"{content['agent']}! {content['observation']}"}]
            content["prompt_ids"] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            content["messages"] = messages
            return DataProto({"input_ids": [content["prompt_ids"]]}, meta_info={"agent": content["agent"]})

    queue = Queue(2)
    manager_of(client, queue, kind=Debate).run_rollout_loop(SEED)
    first, second = queue.rollouts
    assert (len(first), len(second)) == (2, 2)
    tree = client.session_tree(second.meta_info["session_id"])
    turns = [client.show_turn(tree.session_id, node.id) for node in tree.interactions]
    assert [(turn["agent"], turn["reward"]) for turn in turns] == [("planner", 0.5), ("critic", 1.0)]
    assert tree.outcome == "Finished"


def test_random_actions_play_the_environment_and_are_never_trained(client: Client) -> None:
    manager, [rollout] = played(client, proxy_type="random")
    _, [steps] = played(client, kind=StepEnvManager, proxy_type="random", agent_template="{current_observation}")
    assert steps.non_tensor_batch["step_scores"].tolist() == [1.0, 2.0, 3.0]
    assert (len(steps), steps.batch["response_mask"].any()) == (3, False)
    assert not rollout.batch["response_mask"].any()
    assert not rollout.batch["infer_logprobs"].any()
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[1.0, 2.0, 3.0]]
    assert rollout.batch["scores"].sum() == 6.0
    assert "<answer>112</answer>" in text_of(client, rollout)
    assert client.session_tree(rollout.meta_info["session_id"]).interactions == ()
    assert manager.env.actions[0] == "<answer>111</answer>"


def test_a_proxy_of_ones_own_is_asked_again_after_an_abort(client: Client) -> None:
    @register_llm_proxy("roll-test-hesitant")
    class Hesitant(BaseLLMProxy):
        calls = 0

        def generate(self, messages: Any, lm_input: DataProto, generation_config: Any) -> DataProto | None:
            Hesitant.calls += 1
            if Hesitant.calls % 2:
                return None
            made = self.generate_scheduler.generate(lm_input.batch["input_ids"][0].tolist())
            told = {"interaction_id": made.id}
            return DataProto({"responses": [made.output_ids], "infer_logprobs": [made.logprobs]}, meta_info=told)

    _, [rollout] = played(client, proxy_type="roll-test-hesitant")
    assert Hesitant.calls == 6
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[1.0, 2.0, 3.0]]
    Hesitant.generate = lambda self, messages, lm_input, generation_config: None  # type: ignore[method-assign]
    _, [empty] = played(client, proxy_type="roll-test-hesitant")
    assert (
        "asked 3 times, and nothing was sampled"
        in client.session_tree(empty.meta_info["session_id"]).extra["exit_reason"]
    )


def test_tool_results_are_messages_of_the_role_tool(client: Client) -> None:
    class Tools(TrajEnvManager):
        def step(self, llm_output: DataProto) -> RolloutCache:
            cache = super().step(llm_output)
            cache.history[-2]["use_tool"] = cache.step == 1
            return cache

    _, [rollout] = played(client, kind=Tools, env={"length": 2})
    text = text_of(client, rollout)
    assert "<|im_end|>\n<|im_start|>user\n<tool_response>\nSay exactly: <answer>112</answer>\n</tool_response>" in text


def test_the_environment_gets_the_groups_seed_where_its_parameters_name_one(client: Client) -> None:
    assert manager_of(client, Queue(0), env={"seed": 1}).env.others == {"seed": 11}
    assert manager_of(client, Queue(0)).env.others == {}


def test_what_cannot_be_played_is_refused_with_the_reason(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="pre_step_template is missing"):
        manager_of(client, Queue(0), kind=VLTrajEnvManager)
    with pytest.raises(InvalidRequest, match="serve --engine mailbox"):
        manager_of(client, Queue(0), proxy_type="openai")
    with pytest.raises(InvalidRequest, match="must be one of policy, random"):
        manager_of(client, Queue(0), proxy_type="polices")
    before = client.sessions({"status": "active"})
    with pytest.raises(InvalidRequest, match=r"agent_template has \{obs\}"):
        played(client, agent_template="{obs}")
    assert client.sessions({"status": "active"}) == before


def test_an_error_of_the_queue_or_of_the_server_is_raised(client: Client) -> None:
    class Broken(Queue):
        def get_episode_id(self, group_id: int, env_id: int) -> int | None:
            raise ConnectionError("the queue is gone")

    with pytest.raises(ConnectionError):
        manager_of(client, Broken(1)).run_rollout_loop(SEED)
    manager = manager_of(client, Queue(1))
    manager.generate_scheduler = Client(client.url, "a-wrong-key")
    with pytest.raises(ProxyError):
        manager.run_rollout_loop(SEED)


def test_a_users_tokenizer_decodes_and_pads(client: Client) -> None:
    class Own:
        pad_token_id = 5

        def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
            return client.detokenize(list(map(int, ids)), skip_special_tokens=skip_special_tokens).upper()

        def batch_decode(self, rows: Any, skip_special_tokens: bool = False) -> list[str]:
            return [self.decode(ids, skip_special_tokens) for ids in rows]

    manager, [rollout] = played(client, tokenizer=Own())
    assert manager.env.actions[0] == "<ANSWER>111</ANSWER><|IM_END|>"
    assert rollout.batch["input_ids"][0, -1] == 5
    assert np.asarray(rollout.batch["input_ids"]).dtype == np.int64


def test_an_answer_that_was_lost_is_sampled_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_PAUSE_S", 0.0)
    given = []

    class Lossy(Session):
        def generate(self, *args: Any, **options: Any) -> Any:
            given.append(super().generate(*args, **options))
            if len(given) == 1:
                raise ServerUnreachable("the answer was lost")
            return given[-1]

    session = client.start_session("t", grant_capacity=True)
    session.__class__ = Lossy
    live = LiveSession(client, lambda: session)
    prompt_ids = session.tokenize([{"role": "user", "content": "Say exactly: yes"}])
    first = live.generate(prompt_ids, sampling_params={"max_tokens": 8})
    again = live.generate(prompt_ids, sampling_params={"max_tokens": 8})
    session.end()
    assert given[0].id == given[1].id == first.id != again.id
    assert [node.id for node in client.session_tree(session.session_id).interactions] == [first.id, again.id]
