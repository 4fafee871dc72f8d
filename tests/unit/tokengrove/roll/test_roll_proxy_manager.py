"""ROLL's ProxyEnvManager on a live server: episodes, what is put, and what is left after failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from proxy.app import build_app
from proxy.settings import Settings
from tests.support import default_url, function_tool, real_server, shared_renderer, user
from tests.unit.tokengrove.roll.roll_queues import Queue
from tokengrove.client import Client, Sample
from tokengrove.errors import InvalidRequest, Unauthorized
from tokengrove.roll import AgentRunner, BaseEnvManager, DataProto, EpisodeResult, ProxyEnvManager, Section

KEY = "a-key-of-the-administrator"
LENGTH = 448
PAD = 9
LATENCIES = ("pure_inf", "env_exec", "proxy_ovh", "step_rt")
SEED = DataProto(meta_info={"seed": 100})


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of a server that asks for keys everywhere, on which a start needs a grant."""
    settings: dict[str, Any] = {"engine_arg": ("play=agent",), "admin_key": KEY, "capacity_control": True}
    with real_server(tmp_path_factory.mktemp("keyed"), require_key=True, **settings) as url, Client(url, KEY) as client:
        yield client


class Runner(AgentRunner):
    """Asks the model `turns` times in one conversation, with a reward of 0.25 for each."""

    turns = 2

    def __init__(self, base_url: str, env_id: int, env_config: Any, **kwargs: Any) -> None:
        super().__init__(base_url, env_id, env_config, **kwargs)
        self.events: list[str] = []
        self.seeds: list[int] = []

    def setup(self) -> None:
        self.events.append("setup")

    def teardown(self) -> None:
        self.events.append("teardown")

    def ask(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        with httpx.Client() as http:
            message: dict[str, Any] = self._llm_request(http, messages, **more)["choices"][0]["message"]
        return message

    def run_job(self, seed: int) -> EpisodeResult:
        self.seeds.append(seed)
        messages: list[Any] = [user("Say exactly: one")]
        for _ in range(self.turns):
            messages += [self.ask(messages), user("Say exactly: two")]
            self.step_scores.append(0.25)
        return EpisodeResult("Finished", 0.25 * self.turns, self.step_scores, "done", {"steps": self.turns})


def manager_of(
    client: Client, runner: Any, queue: Queue, mode: str = "train", lock: Any = None, **config: Any
) -> ProxyEnvManager:
    pipeline = {"exp_name": "exp", "sequence_length": LENGTH, "step_reward_gamma": 0.5}
    pipeline.update(config.pop("pipeline", {}))
    env = {"tag": "Sums", "group_id": 3, "env_id": 7, "group_seed": 11, "max_tokens_per_step": 64}
    return ProxyEnvManager(
        worker_config=Section(generating_args={"max_new_tokens": 32, "temperature": 1.0}),
        pipeline_config=Section(pipeline),
        env_config=Section(agent_runner_cls=runner, config=config, **{**env, **config.pop("env", {})}),
        tokenizer=Section(pad_token_id=PAD),
        generate_scheduler=client,
        output_queue=queue,
        thread_lock=lock,
        mode=mode,
    )


def played(client: Client, runner: Any = Runner, episodes: int = 1, **config: Any) -> Queue:
    queue = Queue(episodes)
    manager_of(client, runner, queue, **config).run_rollout_loop(SEED)
    return queue


def exported(client: Client, rollout: DataProto, layout: Any = "concat", **options: Any) -> list[Sample]:
    return client.export(session_id=rollout.meta_info["session_id"], layout=layout, **options).samples


def shown(client: Client, rollout: DataProto) -> Any:
    return client.session_tree(rollout.meta_info["session_id"])


def assert_rows_are_the_samples(rollout: DataProto, samples: list[Sample]) -> None:
    """Every token, mask and logprob of the rows, to the padding."""
    assert len(rollout) == len(samples)
    batch = rollout.batch
    for row, sample in enumerate(samples):
        length, trained = len(sample.input_ids), np.flatnonzero(sample.loss_mask)
        assert batch["input_ids"][row].tolist() == [*sample.input_ids.tolist(), *[PAD] * (LENGTH - length)]
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (LENGTH - length)
        assert batch["position_ids"][row].tolist() == [*range(length), *[0] * (LENGTH - length)]
        assert np.flatnonzero(batch["response_mask"][row]).tolist() == trained.tolist()
        assert batch["prompt_mask"][row].sum() == min(turn["span"][0] for turn in sample.turns)
        assert batch["infer_logprobs"][row, : length - 1].tolist() == sample.logprobs[1:].tolist()
        assert batch["infer_logprobs"].shape == (len(samples), LENGTH - 1)


def test_an_episode_is_put_as_its_session_was_sampled(client: Client) -> None:
    queue = played(client)
    (rollout,) = queue.rollouts
    samples = exported(client, rollout)
    assert_rows_are_the_samples(rollout, samples)
    assert np.flatnonzero(rollout.batch["scores"][0]).tolist() == [len(samples[0].input_ids) - 1]
    assert rollout.batch["scores"].sum() == 0.5
    found = {name: column.tolist() for name, column in rollout.non_tensor_batch.items()}
    assert found["traj_group_id"] == ["Sums_3_0_111"] and found["traj_id"][0].startswith("Sums_3_0_111_7_")
    assert (found["env_ids"], found["group_ids"], found["tags"], found["exp_name"]) == ([7], [3], ["Sums"], ["exp"])
    assert (found["step_scores"], found["episode_scores"], found["step"]) == ([[0.25, 0.25]], [0.5], [0])
    assert [message["content"] for message in orjson.loads(found["messages"][0])] == [
        *("Say exactly: one", "one", "Say exactly: two", "two")
    ]
    data = orjson.loads(found["trajectory_data"][0])
    assert (data["trajectory_id"], data["num_actions"]) == (found["traj_id"][0], 2)
    assert data["reward_info"] == {"episode_reward": 0.5, "step_reward": 0.5}
    assert all(column.dtype == object for column in rollout.non_tensor_batch.values())
    dtypes = {name: column.dtype.name for name, column in rollout.batch.items()}
    assert {name: dtypes[name] for name in ("input_ids", "response_mask", "scores", "infer_logprobs")} == {
        **{"input_ids": "int64", "response_mask": "bool", "scores": "float32", "infer_logprobs": "float32"}
    }
    tree = shown(client, rollout)
    assert [node.reward for node in tree.interactions] == [0.25, 0.25]
    assert (tree.outcome, tree.extra["exit_reason"], tree.extra["metrics"]["steps"]) == ("Finished", "done", 2)


def test_a_step_is_a_row_with_its_own_score_and_the_id_of_its_episode(client: Client) -> None:
    (rollout,) = played(client, trajectory_mode="step").rollouts
    samples = exported(client, rollout, "individual")
    assert_rows_are_the_samples(rollout, samples)
    found = rollout.non_tensor_batch
    assert found["step_scores"].tolist() == rollout.batch["scores"].sum(axis=1).tolist() == [0.25, 0.25]
    assert len(set(found["traj_id"].tolist())) == 1 and found["step"].tolist() == [0, 1]
    assert found["episode_scores"].tolist() == [0.5, 0.5]
    branches = [orjson.loads(text) for text in found["trajectory_data"]]
    assert [branch["trajectory_id"].removeprefix(found["traj_id"][0]) for branch in branches] == ["_b0", "_b1"]
    assert [branch["branch_or_step_idx"] for branch in branches] == [0, 1]


def test_rewards_are_discounted_on_request(client: Client) -> None:
    discounted = {"pipeline": {"apply_reward_discount": True}}
    (steps,) = played(client, trajectory_mode="step", **discounted).rollouts
    assert steps.batch["scores"].sum(axis=1).tolist() == [0.375, 0.25]
    assert steps.non_tensor_batch["step_scores"].tolist() == [0.25, 0.25]
    (whole,) = played(client, **discounted).rollouts
    assert whole.batch["scores"].sum() == 0.375 and whole.non_tensor_batch["episode_scores"].tolist() == [0.5]


def test_the_metrics_have_rolls_names_and_the_runners_own(client: Client) -> None:
    (rollout,) = played(client).rollouts
    metrics = rollout.meta_info["metrics"]
    names = {
        *("num_actions", "response_length", "episode_score", "traj_time_total", "throughput/step_per_sec"),
        *("prompt_length", "total_tokens", "num_branches_or_steps", "steps", "score"),
        *(f"efficiency/{name}_pct" for name in ("logic", "env_setup", "agent_setup")),
        *(
            f"latency/{n}_{how}"
            for n in ("pure_inf", "env_exec", "proxy_ovh", "step_rt")
            for how in ("avg", "p99", "max")
        ),
    }
    assert metrics.keys() == {*(f"env/Sums/{name}" for name in names), "env/response_length"}
    (sample,) = exported(client, rollout)
    trained = int(sample.loss_mask.sum())
    assert (metrics["env/Sums/response_length"], metrics["env/Sums/num_actions"]) == (trained, 2)
    assert metrics["env/Sums/prompt_length"] == len(sample.input_ids) - trained
    assert (metrics["env/Sums/episode_score"], metrics["env/Sums/steps"]) == (0.5, 2)
    assert metrics["env/Sums/latency/step_rt_max"] >= metrics["env/Sums/latency/pure_inf_max"] >= 0
    assert metrics["env/Sums/traj_time_total"] > 0 and metrics["env/Sums/throughput/step_per_sec"] > 0
    assert [name for name, _ in rollout.meta_info["COLUMMNS_CONFIG"]] == [
        *("trajectory_data", "messages", "tools", "exp_name")
    ]


def test_one_runner_plays_all_episodes_with_the_seeds_of_its_group(client: Client) -> None:
    queue = Queue(3)
    manager = manager_of(client, Runner, queue)
    manager.update_step(4)
    manager.run_rollout_loop(SEED)
    runner = manager.agent_runner
    assert (runner.events, runner.seeds) == (["setup", "teardown"], [111, 112, 113])
    assert (runner.env_id, runner.worker_config.generating_args.max_new_tokens) == (7, 32)
    assert [put[:3] for put in queue.puts] == [(3, 0, 4), (3, 1, 4), (3, 2, 4), (3, None, 4)]
    assert [put[4] for put in queue.puts] == [7] * 4
    assert [shown(client, rollout).extra["metadata"]["seed"] for rollout in queue.rollouts] == [111, 112, 113]
    assert manager.running is False


def test_a_runner_without_data_ends_the_loop_and_puts_no_rollout(client: Client) -> None:
    class Exhausted(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            return super().run_job(seed) if seed == 111 else EpisodeResult("NoData", 0.0)

    queue = played(client, Exhausted, episodes=5)
    assert [put[1] for put in queue.puts] == [0, 1] and len(queue.rollouts) == 1
    (session,) = client.sessions({"group_id": "Sums_3_1_111", "outcome": "NoData"})
    assert session["status"] == "ended"


def test_what_a_runner_earned_before_it_failed_is_kept_and_the_loop_goes_on(client: Client) -> None:
    class Breaks(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            if seed == 111:
                super().run_job(seed)
                raise ZeroDivisionError("in the environment")
            return super().run_job(seed)

    broken, whole = played(client, Breaks, episodes=2).rollouts
    assert_rows_are_the_samples(broken, exported(client, broken))
    assert broken.batch["scores"].sum() == whole.batch["scores"].sum() == 0.5
    tree = shown(client, broken)
    assert (tree.outcome, tree.extra["exit_reason"]) == ("Failed", "ZeroDivisionError: in the environment")
    assert [node.reward for node in tree.interactions] == [0.25, 0.25]


def test_a_runner_that_hangs_is_replaced_and_its_late_requests_find_no_session(client: Client) -> None:
    go_on, runners = threading.Event(), list[Any]()
    late: list[str] = []

    class Hangs(Runner):
        def setup(self) -> None:
            runners.append(self)

        def run_job(self, seed: int) -> EpisodeResult:
            result = super().run_job(seed)
            if len(runners) == 1:
                go_on.wait(60)
                url, key = f"{self.base_url}/v1/chat/completions", {"Authorization": f"Bearer {self.api_key}"}
                refused = httpx.post(url, json={"messages": [user("Say exactly: late")]}, headers=key)
                late.append(refused.json()["error"]["code"])
            return result

        def teardown(self) -> None:
            torn_down.set()

    torn_down = threading.Event()
    timed_out, whole = played(client, Hangs, episodes=2, episode_timeout=0.2).rollouts
    first, second = runners
    assert (first.base_url != second.base_url, first.api_key != second.api_key) == (True, True)
    assert torn_down.is_set()
    torn_down.clear()
    go_on.set()
    assert torn_down.wait(60) and late == ["session_closed"]
    tree = shown(client, timed_out)
    assert (tree.outcome, tree.extra["finished"], len(tree.interactions)) == ("Timeout", False, 2)
    assert timed_out.batch["scores"].sum() == 0.5 and len(shown(client, whole).interactions) == 2


def test_a_runner_that_hangs_is_cancelled_and_the_next_of_whatever_class_is_set_up(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokengrove.roll.managers.proxy_env_manager._GRACE_S", 0.0)
    go_on, ready = threading.Event(), list[Any]()

    class Plain:
        def __init__(self, base_url: str, env_id: int, env_config: Any) -> None:
            self.enforces_task_timeout = bool(ready)

        def setup(self) -> None:
            ready.append(self)

        def run_job(self, seed: int) -> EpisodeResult:
            if self is ready[0]:
                go_on.wait(60)
            return EpisodeResult("Failed", float(ready.index(self)))

        def cancel(self) -> None:
            go_on.set()

    manager = manager_of(client, Plain, queue := Queue(2), task_timeout_sec=0.01)
    manager.run_rollout_loop(SEED)
    assert go_on.is_set()
    assert [shown(client, rollout).outcome for rollout in queue.rollouts] == ["Timeout", "Failed"]
    assert ready == [*ready[:1], manager.agent_runner]


def test_a_session_ends_also_when_no_other_runner_can_be_made(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokengrove.roll.managers.proxy_env_manager._GRACE_S", 0.0)
    go_on, made = threading.Event(), list[Any]()

    class Once(Runner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if made:
                raise OSError("there is no second one")
            super().__init__(*args, **kwargs)
            made.append(self)

        def run_job(self, seed: int) -> EpisodeResult:
            go_on.wait(60)
            return EpisodeResult("Finished", 0.0)

    with pytest.raises(OSError, match="no second"):
        played(client, Once, episode_timeout=0.01)
    go_on.set()
    assert client.sessions({"status": "active"}) == []


def test_a_task_timeout_is_the_managers_unless_the_runner_enforces_it(client: Client) -> None:
    class Enforces(Runner):
        enforces_task_timeout = True

    limits = [
        manager_of(client, runner, Queue(0), **config)._limit_s()
        for runner, config in (
            (Runner, {"task_timeout_sec": 30}),
            (Enforces, {"task_timeout_sec": 30}),
            (Enforces, {"task_timeout_sec": 30, "episode_timeout": 40}),
            (Runner, {}),
        )
    ]
    assert limits == [30.0, None, 40.0, None]


def test_an_episode_without_a_turn_is_one_row_of_padding(client: Client) -> None:
    class Silent(Runner):
        turns = 0

        def run_job(self, seed: int) -> EpisodeResult:
            return EpisodeResult("Finished", 1.0)

    for mode in ("traj", "step"):
        (rollout,) = played(client, Silent, trajectory_mode=mode).rollouts
        batch, found = rollout.batch, rollout.non_tensor_batch
        assert batch["input_ids"].tolist() == [[PAD] * LENGTH] and batch["attention_mask"].sum() == 1
        assert not batch["response_mask"].any() and not batch["scores"].any() and not batch["infer_logprobs"].any()
        assert (found["episode_scores"].tolist(), found["messages"].tolist()) == ([0.0], ["[]"])
        assert found["traj_group_id"].tolist() == ["Sums_3_0_111"] and found["env_ids"].tolist() == [7]
        assert rollout.meta_info["metrics"]["env/Sums/num_branches_or_steps"] == 1
        assert rollout.meta_info["metrics"]["env/Sums/total_tokens"] == 1


def test_the_score_is_the_metric_that_the_granularity_names(client: Client) -> None:
    class Scored(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            super().run_job(seed)
            return EpisodeResult("Finished", 1.0, None, "", {"pass_rate": np.float32(0.75), "ratio": 0.125})

    def scores(**config: Any) -> tuple[float, list[float]]:
        (traj,) = played(client, Scored, **config).rollouts
        (step,) = played(client, Scored, trajectory_mode="step", **config).rollouts
        assert traj.non_tensor_batch["episode_scores"][0] == step.non_tensor_batch["episode_scores"][0]
        return float(traj.batch["scores"].sum()), step.non_tensor_batch["step_scores"].tolist()

    assert scores() == (1.0, [0.0, 1.0])
    assert scores(reward_granularity="pass_rate") == (0.75, [0.0, 0.75])
    assert scores(reward_granularity="binary") == (1.0, [0.0, 1.0])
    assert scores(reward_granularity="ratio") == (0.125, [0.0, 0.125])


def test_a_score_that_is_not_the_sum_of_the_steps_stands_beside_them(client: Client) -> None:
    class Shaped(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            super().run_job(seed)
            return EpisodeResult("Finished", 1.0, [0.125, 0.25])

    (traj,) = played(client, Shaped).rollouts
    (step,) = played(client, Shaped, trajectory_mode="step").rollouts
    assert traj.batch["scores"].sum() == 1.0 and traj.non_tensor_batch["step_scores"].tolist() == [[0.125, 0.25]]
    assert step.non_tensor_batch["step_scores"].tolist() == [0.125, 0.25]
    assert step.non_tensor_batch["episode_scores"].tolist() == [1.0, 1.0]


class Rated(Runner):
    """What the runner says of an episode disagrees with itself: its score, its steps, and a metric."""

    def run_job(self, seed: int) -> EpisodeResult:
        super().run_job(seed)
        return EpisodeResult("Finished", 5.0, [1.0, 2.0], "", {"pass_rate": 0.25, "board": "#"})


@pytest.mark.parametrize(("config", "score"), [({}, 5.0), ({"reward_granularity": "pass_rate"}, 0.25)])
def test_a_metric_replaces_a_score_only_where_it_is_named_and_step_scores_survive(
    client: Client, config: dict[str, Any], score: float
) -> None:
    (traj,) = played(client, Rated, **config).rollouts
    (step,) = played(client, Rated, trajectory_mode="step", **config).rollouts
    assert traj.batch["scores"].sum(axis=1).tolist() == traj.non_tensor_batch["episode_scores"].tolist() == [score]
    assert traj.non_tensor_batch["step_scores"].tolist() == [[1.0, 2.0]]
    assert step.batch["scores"].sum(axis=1).tolist() == step.non_tensor_batch["step_scores"].tolist() == [1.0, 2.0]
    assert step.non_tensor_batch["episode_scores"].tolist() == [score, score]
    assert step.batch["step_rewards"].tolist() == [2.0, 2.0]  # gamma 0.5
    assert [node.reward for node in shown(client, traj).interactions] == [1.0, 2.0]
    (sample,) = exported(client, traj)
    assert (sample.reward, sample.score, sample.reward_scope) == (score, score, "session")
    metrics = shown(client, traj).extra["metrics"]
    assert (metrics["score"], metrics["pass_rate"]) == (5.0, 0.25)


def test_the_log_says_once_that_a_metric_is_the_score(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokengrove.roll.managers.base_env_manager._said", set())
    played(client, Rated, episodes=2)
    assert "score" not in caplog.text
    played(client, Rated, episodes=2, reward_granularity="pass_rate")
    [told] = [record.getMessage() for record in caplog.records if "pass_rate" in record.getMessage()]
    assert told == "Sums: the metric 'pass_rate' is the score of an episode, instead of the runner's"


def test_an_episode_without_the_metric_that_is_named_has_its_score_and_the_log_names_it(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    (rollout,) = played(client, Rated, reward_granularity="passrate").rollouts
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [5.0]
    assert f"session {rollout.meta_info['session_id']}: no metric 'passrate', so the runner's score 5.0" in caplog.text


def test_a_score_beyond_the_steps_is_discounted_from_the_last_turn(client: Client) -> None:
    discounted = {"pipeline": {"apply_reward_discount": True}}
    (traj,) = played(client, Rated, **discounted).rollouts
    (step,) = played(client, Rated, trajectory_mode="step", **discounted).rollouts
    assert traj.batch["scores"].sum() == 1.0 + 0.5 * (2.0 + 2.0)  # 5.0 is 2.0 more than the steps
    assert traj.non_tensor_batch["episode_scores"].tolist() == [5.0]
    assert step.batch["scores"].sum(axis=1).tolist() == [2.0, 2.0]


def test_forks_are_rows_and_no_sampled_token_is_trained_twice_or_lost(client: Client) -> None:
    class Forks(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            first = [user("Say exactly: one")]
            answer = self.ask(first)
            self.ask([*first, answer, user("Say exactly: two")])
            self.ask([*first, answer, user("Say exactly: three")])
            self.ask([*first, {"role": "assistant", "content": "rewritten"}, user("Say exactly: four")])
            return EpisodeResult("Finished", 1.0)

    (rollout,) = played(client, Forks).rollouts
    samples = exported(client, rollout)
    assert_rows_are_the_samples(rollout, samples)
    sampled = sum(node.output_tokens for node in shown(client, rollout).interactions)
    assert int(rollout.batch["response_mask"].sum()) == sampled and len(rollout) == 3
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [1.0] * 3
    assert rollout.batch["scores"].sum(axis=1).tolist() == [1.0] * 3
    (kept,) = played(client, Forks, enable_fork=True).rollouts
    (masked,) = played(client, Forks, enable_fork=False).rollouts
    assert len(kept) == 3
    assert_rows_are_the_samples(masked, exported(client, masked, drift="mask"))


def test_enable_fork_says_whether_what_was_rewritten_begins_a_row(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, export = list[Any](), client.export

    def noted(**options: Any) -> Any:
        asked.append(options["drift"])
        return export(**options)

    monkeypatch.setattr(client, "export", noted)
    for enable_fork in (None, True, False):
        played(client, enable_fork=enable_fork)
    assert asked == ["fork", "fork", "mask"]


def test_tool_calls_reach_the_runner_and_the_rows(client: Client) -> None:
    tool = function_tool("add", {"a": {"type": "integer"}})

    class Calls(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            messages: list[Any] = [user("What is 1 + 1? Use the tool.")]
            answer = self.ask(messages, tools=[tool])
            (call,) = answer["tool_calls"]
            messages += [answer, {"role": "tool", "tool_call_id": call["id"], "content": "2"}]
            self.ask(messages, tools=[tool])
            return EpisodeResult("Finished", 1.0)

    (rollout,) = played(client, Calls).rollouts
    assert_rows_are_the_samples(rollout, exported(client, rollout))
    assert [each["function"]["name"] for each in orjson.loads(rollout.non_tensor_batch["tools"][0])] == ["add"]
    roles = [message["role"] for message in orjson.loads(rollout.non_tensor_batch["messages"][0])]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_a_full_sequence_ends_an_episode_with_what_was_earned(client: Client) -> None:
    class Endless(Runner):
        turns = 100

    (rollout,) = played(client, Endless).rollouts
    samples, tree = exported(client, rollout), shown(client, rollout)
    assert_rows_are_the_samples(rollout, samples)
    turns = sum(node.turn is not None for node in tree.interactions)
    assert (tree.outcome, turns > 1, rollout.batch["scores"].sum()) == ("Finished", True, 0.25 * turns)
    assert "maximum context length" in tree.extra["exit_reason"]


def test_failures_and_timeouts_leave_no_grant_and_no_live_session(client: Client) -> None:
    class Fails(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            if seed % 2:
                raise RuntimeError("broken")
            return EpisodeResult("RunnerError", 0.0, agent_exit_reason="no sandbox")

    before = client.grant_capacity(1)
    assert len(played(client, Fails, episodes=4, pipeline={"max_failed_episodes": -1}).rollouts) == 4
    assert client.grant_capacity(1) == before + 1
    assert client.sessions({"status": "active"}) == []


@pytest.mark.parametrize(
    "returned",
    [
        None,
        EpisodeResult("Finished", float("inf")),
        EpisodeResult("Finished", 1e60),
        EpisodeResult("Finished", 0, ["x"]),
    ],
)
def test_a_result_that_is_none_is_a_failure_that_says_so(client: Client, returned: Any) -> None:
    class Odd(Runner):
        def run_job(self, seed: int) -> Any:
            super().run_job(seed)
            return returned

    (rollout,) = played(client, Odd).rollouts
    assert np.isfinite(rollout.batch["scores"]).all() and len(exported(client, rollout)) == 1
    tree = shown(client, rollout)
    assert tree.outcome == "Failed" and tree.extra["exit_reason"].startswith("run_job returned")


@pytest.mark.parametrize("spoilt", [None, ["x"], [float("nan")]])
def test_step_scores_that_are_no_numbers_cost_a_failed_episode_its_rewards_alone(client: Client, spoilt: Any) -> None:
    class Spoils(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            super().run_job(seed)
            self.step_scores = spoilt
            raise ZeroDivisionError("in the environment")

    (rollout,) = played(client, Spoils).rollouts
    assert shown(client, rollout).extra["exit_reason"] == "ZeroDivisionError: in the environment"


def test_a_runner_that_hangs_without_step_scores_is_a_timeout(client: Client) -> None:
    go_on = threading.Event()

    class Hangs(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            self.step_scores = None  # type: ignore[assignment]
            go_on.wait(60)
            return EpisodeResult("Finished", 1.0)

    (rollout,) = played(client, Hangs, episode_timeout=0.1).rollouts
    go_on.set()
    assert shown(client, rollout).outcome == "Timeout"


def test_rows_have_the_weight_version_of_every_trained_token(client: Client) -> None:
    class Updates(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            messages: list[Any] = [user("Say exactly: one")]
            messages += [self.ask(messages), user("Say exactly: two")]
            client.update_weights("/models/next", version=before + 1)
            self.ask(messages)
            return EpisodeResult("Finished", 1.0)

    before = client.engine().version
    (rollout,) = played(client, Updates).rollouts
    (sample,), versions = exported(client, rollout), rollout.batch["versions"][0]
    assert versions[: len(sample.input_ids)].tolist() == sample.versions.tolist()
    assert set(versions[rollout.batch["response_mask"][0]].tolist()) == {before, before + 1}
    assert set(versions[~rollout.batch["response_mask"][0]].tolist()) == {-1}


def test_answers_without_logprobs_are_context_and_said_to_be(tmp_path: Any) -> None:
    with real_server(tmp_path, engine="mailbox") as url, Client(url) as client, Client(url) as model:
        queue = Queue(1)
        manager = manager_of(client, Runner, queue)
        with pytest.warns(UserWarning, match="no_logprobs"):
            playing = threading.Thread(target=manager.run_rollout_loop, args=(SEED,))
            playing.start()
            for _ in range(Runner.turns):
                asked = model.next_request(wait_s=60.0)
                model.deliver(interaction_id=asked["interaction_id"], text="an answer")
            playing.join(60)
        (rollout,) = queue.rollouts
        assert not rollout.batch["response_mask"].any() and rollout.batch["scores"].sum() == 0.5
        assert [len(turns) for turns in rollout.non_tensor_batch["step_scores"]] == [2]


def test_a_stopped_manager_ends_its_episode_and_puts_nothing_of_it(client: Client) -> None:
    begun = threading.Event()

    class Waits(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            self.ask([user("Say exactly: one")])
            begun.set()
            while True:
                self.ask([user("Say exactly: one")])

    queue = Queue(10)
    manager = manager_of(client, Waits, queue)
    playing = threading.Thread(target=manager.run_rollout_loop, args=(SEED,))
    playing.start()
    assert begun.wait(60)
    manager.stop()
    playing.join(60)
    assert not playing.is_alive() and [put[3] for put in queue.puts] == [None]
    assert client.sessions({"status": "active"}) == []
    assert manager.agent_runner.events == ["setup", "teardown"] and not manager._slot.is_abandoned


def test_a_stopped_manager_cancels_its_runner_which_ends_by_itself(client: Client) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    class Job(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            begun.set()
            assert cancelled.wait(60)
            return EpisodeResult("Failed", 0.0)

        def cancel(self) -> None:
            cancelled.set()

    manager = manager_of(client, Job, Queue(1))
    playing = threading.Thread(target=manager.run_rollout_loop, args=(SEED,))
    playing.start()
    assert begun.wait(60)
    manager.stop()
    playing.join(60)
    assert manager.agent_runner.events == ["setup", "teardown"] and not manager._slot.is_abandoned


def test_a_stopped_manager_leaves_a_runner_that_hangs_and_may_play_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokengrove.roll.managers.proxy_env_manager._STOP_S", 0.0)
    begun, go_on, torn_down = threading.Event(), threading.Event(), threading.Event()

    class Hangs(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            begun.set()
            go_on.wait(60)
            return super().run_job(seed)

        def teardown(self) -> None:
            super().teardown()
            torn_down.set()

    queue = Queue(2)
    manager = manager_of(client, Hangs, queue)
    runner = manager.agent_runner
    playing = threading.Thread(target=manager.run_rollout_loop, args=(SEED,))
    playing.start()
    assert begun.wait(60)
    manager.stop()
    playing.join(60)
    assert not playing.is_alive() and not torn_down.is_set() and [put[3] for put in queue.puts] == [None]
    go_on.set()
    assert torn_down.wait(60)
    manager.run_rollout_loop(SEED)
    assert manager.agent_runner is not runner and len(queue.rollouts[1]) == 1


def test_a_manager_may_play_again_with_the_same_runner(client: Client) -> None:
    manager = manager_of(client, Runner, Queue(1))
    for _ in range(2):
        manager.output_queue = queue = Queue(1)
        manager.run_rollout_loop(SEED)
        assert len(queue.rollouts) == 1
    assert manager.agent_runner.events == ["setup", "teardown", "setup", "teardown"]


def test_formulate_rollouts_may_be_overridden_and_gets_the_result_as_a_dict(client: Client) -> None:
    class Manager(ProxyEnvManager):
        def formulate_rollouts(self, result: dict[str, Any]) -> DataProto:
            rollout = super().formulate_rollouts(result)
            rollout.meta_info["result"] = result
            return rollout

    queue = Queue(1)
    made = manager_of(client, Runner, Queue(0))
    given = ("worker_config", "pipeline_config", "env_config", "tokenizer", "generate_scheduler")
    manager = Manager(**{name: getattr(made, name) for name in given}, output_queue=queue, thread_lock=threading.Lock())
    manager.run_rollout_loop(SEED)
    assert queue.rollouts[0].meta_info["result"] == {
        **{"steps": 2, "status": "Finished", "score": 0.5, "step_scores": [0.25, 0.25], "agent_exit_reason": "done"}
    }


def test_what_formulate_rollouts_raises_is_raised_after_the_session_has_ended(client: Client) -> None:
    class Manager(ProxyEnvManager):
        def formulate_rollouts(self, result: dict[str, Any]) -> DataProto:
            raise LookupError("in the rows")

    queue, made = Queue(2), manager_of(client, Runner, Queue(0))
    given = ("worker_config", "pipeline_config", "env_config", "tokenizer", "generate_scheduler")
    manager = Manager(**{name: getattr(made, name) for name in given}, output_queue=queue)
    with pytest.raises(LookupError, match="in the rows"):
        manager.run_rollout_loop(SEED)
    assert (queue.puts, manager.running, manager.agent_runner.events) == ([], False, ["setup", "teardown"])
    assert manager.episode is not None and manager.episode.outcome == "Finished"
    assert client.sessions({"status": "active"}) == []


def test_a_loop_that_plays_no_episode_hears_what_to_override(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="Override formulate_rollouts or the runner's run_job"):
        manager_of(client, Runner, Queue(0)).formulate_rollouts({"score": 1.0})


def test_errors_of_teardown_are_logged_and_hide_no_other(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    class Closes(Runner):
        def teardown(self) -> None:
            raise OSError("cannot close")

    class Unready(Closes):
        def setup(self) -> None:
            raise LookupError("no data set")

    assert len(played(client, Closes).rollouts) == 1
    assert "cannot close" in caplog.text
    with pytest.raises(LookupError, match="no data set"):
        played(client, Unready)


def test_the_lock_is_held_where_the_environment_asks_for_it(client: Client) -> None:
    lock, held = threading.Lock(), list[bool]()

    class Held(Runner):
        def setup(self) -> None:
            held.append(lock.locked())

        def run_job(self, seed: int) -> EpisodeResult:
            held.append(lock.locked())
            return super().run_job(seed)

    played(client, Held, lock=lock, env={"use_thread_lock": True})
    played(client, Held, lock=lock)
    assert held == [True, False, False, False]


def test_managers_side_by_side_keep_their_episodes_apart(client: Client) -> None:
    class Says(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            messages: list[Any] = []
            for number in range(3):
                messages += [user(f"Say exactly: env {self.env_id} turn {number}")]
                messages += [self.ask(messages)]
            return EpisodeResult("Finished", float(self.env_id))

    queues = [Queue(2) for _ in range(4)]
    managers = [manager_of(client, Says, queue, env={"env_id": at}) for at, queue in enumerate(queues)]
    threads = [threading.Thread(target=manager.run_rollout_loop, args=(SEED,)) for manager in managers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for at, queue in enumerate(queues):
        for rollout in queue.rollouts:
            said = [message["content"] for message in orjson.loads(rollout.non_tensor_batch["messages"][0])]
            assert said[1::2] == [f"env {at} turn {number}" for number in range(3)]
            assert rollout.batch["scores"].sum() == at


def test_arguments_without_a_meaning_here_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        BaseEnvManager(collator_of_mine=object(), processor=None)
    assert [record.getMessage().split()[0] for record in caplog.records] == ["collator_of_mine"]


def test_a_configuration_that_cannot_play_is_refused_at_once(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="agent_runner_cls is null"):
        manager_of(client, None, Queue(1))
    with pytest.raises(InvalidRequest, match="trajectory_mode is 'token'"):
        manager_of(client, Runner, Queue(1), trajectory_mode="token")
    with pytest.raises(ValueError, match="no 'seed'"):
        manager_of(client, Runner, Queue(1)).run_rollout_loop(DataProto())
    with Client(client.url) as keyless, pytest.raises(Unauthorized):
        manager_of(keyless, Runner, Queue(1)).run_rollout_loop(SEED)


def test_the_trainers_sampling_counts_whatever_the_agent_asks_for(client: Client) -> None:
    class Asks(Runner):
        def run_job(self, seed: int) -> EpisodeResult:
            body = {"messages": [user("Say exactly: one")], "temperature": 0.25, "top_p": 0.5, "max_tokens": 1}
            for more in ({}, {"max_tokens": 1000}):
                url, headers = f"{self.base_url}/v1/chat/completions", {"Authorization": f"Bearer {self.api_key}"}
                httpx.post(url, json={**body, **more}, headers=headers).raise_for_status()
            return EpisodeResult("Finished", 0.0)

    (rollout,) = played(client, Asks, trajectory_mode="step").rollouts
    sampling = [sample.sampling for sample in exported(client, rollout, "individual")]
    assert sampling == [{"temperature": 1.0, "max_tokens": 1}, {"temperature": 1.0, "max_tokens": 32}]


@pytest.mark.parametrize("config", [{}, {"enable_thinking": True}])
def test_the_template_thinks_if_the_environment_says_so(client: Client, config: dict[str, Any]) -> None:
    (rollout,) = played(client, **config).rollouts
    turn = client.show_turn(rollout.meta_info["session_id"], 0, ["messages"])
    assert turn["template_options"]["enable_thinking"] is bool(config)


def test_the_parser_of_tool_calls_is_that_of_the_environment(client: Client) -> None:
    manager = manager_of(client, Runner, Queue(1), tool_call_parser="qwen25")
    assert manager.tool_call_parser == "qwen25"
    assert manager.session_options(manager.env_config, manager.worker_config)["tool_parser"] == "qwen25"
    with pytest.raises(InvalidRequest, match="no-such-parser"):
        played(client, tool_call_parser="no-such-parser")


def test_stop_strings_behind_a_tool_call_end_each_answer_there(client: Client) -> None:
    manager = manager_of(client, Runner, queue := Queue(1))
    manager.worker_config.generating_args.stop_strings = ["</tool_call>", "</tool_call>\n", "\n</tool_call>\n"]
    assert manager.session_options(manager.env_config, manager.worker_config)["parallel_tool_calls"] is False
    manager.run_rollout_loop(SEED)
    assert queue.rollouts[0].batch["scores"].sum() == 0.5


def test_a_server_that_lets_nobody_choose_keys_gives_each_episode_its_address(tmp_path: Any) -> None:
    class Keeps(Runner):
        def __init__(self, base_url: str, env_id: int, env_config: Any, **kwargs: Any) -> None:
            super().__init__(base_url, env_id, env_config, **kwargs)
            self.kept = base_url

        def run_job(self, seed: int) -> EpisodeResult:
            if seed == 112:
                self.base_url = self.kept
            return super().run_job(seed)

    with real_server(tmp_path, engine_arg=("play=agent",), admin_key=KEY, host="0.0.0.0") as url:
        here = f"http://127.0.0.1:{url.rpartition(':')[2]}"
        with Client(here, KEY) as remote:
            first, stuck, third = played(remote, Keeps, episodes=3).rollouts
            for rollout in (first, third):
                assert_rows_are_the_samples(rollout, exported(remote, rollout))
            assert shown(remote, stuck).extra["exit_reason"].startswith("RequestError: 401")


def test_a_runner_of_an_application_in_this_process_reaches_it(tmp_path: Any) -> None:
    settings = Settings(engine="scripted", engine_arg=("play=agent",), database_url=default_url(tmp_path))
    with shared_renderer(settings), Client(app=build_app(settings)) as inside:
        (rollout,) = played(inside).rollouts
        assert_rows_are_the_samples(rollout, exported(inside, rollout))
