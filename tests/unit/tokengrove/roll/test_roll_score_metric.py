"""`reward_granularity` names a metric: what there is in the first finished group decides whether a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import real_server
from tests.unit.tokengrove.roll.roll_runner import Runner
from tokengrove.client import Client
from tokengrove.errors import InvalidRequest
from tokengrove.roll import AgenticConfig, DataProto, RolloutScheduler
from tokengrove.roll.scheduler import get_episode_scores
from tokengrove.roll.values.score_metric import ScoreMetric, ScoreMetrics, metric_value

PROXY = "roll.pipeline.agentic.env_manager.proxy_env_manager.ProxyEnvManager"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with real_server(tmp_path_factory.mktemp("server"), engine_arg=("play=agent",)) as url, Client(url) as client:
        yield client


def batch(client: Client, granularity: str | None) -> DataProto | None:
    """A batch of `Runner`, whose metrics are `pass_rate` and a text."""
    Runner.log.clear()
    env_config = {} if granularity is None else {"reward_granularity": granularity}
    config = AgenticConfig(
        {
            "seed": 1,
            "sequence_length": 512,
            "rollout_batch_size": 4,
            "actor_infer": {"generating_args": {"max_new_tokens": 16}},
            "custom_envs": {
                "Steps": {
                    **{"env_type": "steps", "max_steps": 2, "max_tokens_per_step": 16, "env_config": env_config},
                    **{"env_manager_cls": PROXY, "agent_runner_cls": f"{Runner.__module__}.Runner"},
                }
            },
            "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Steps"]},
        }
    )
    with RolloutScheduler(config, config.train_env_manager, client=client) as scheduler:
        return scheduler.get_batch(DataProto(meta_info={"global_step": 0}), 4)


@pytest.mark.parametrize(("granularity", "score"), [(None, 0.5), ("pass_rate", 0.25), ("binary", 0.5)])
def test_a_batch_has_the_runners_scores_or_those_of_the_metric_that_is_named(
    client: Client, granularity: str | None, score: float
) -> None:
    found = batch(client, granularity)
    assert found is not None
    assert get_episode_scores(found).tolist() == [score] * 4
    assert found.non_tensor_batch["step_scores"].tolist() == [[0.0], [1.0]] * 4
    assert "score_metric" not in found.meta_info


def test_a_metric_that_the_first_finished_group_never_had_ends_the_run_and_names_those_that_it_saw(
    client: Client,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        batch(client, "passrate")
    assert caught.value.param == "reward_granularity"
    assert caught.value.message == (
        "reward_granularity of 'Steps' is 'passrate', but no episode of the first finished group has a metric of that "
        "name. Metrics that were seen: pass_rate. Name one of these, or remove reward_granularity to use the score "
        "of the runner"
    )


def metric(status: str = "Finished", tag: str = "a", name: str = "rate", **metrics: Any) -> ScoreMetric:
    return ScoreMetric.of(tag, name, metrics, status)


def test_one_episode_of_the_first_group_with_the_metric_is_enough_for_all_groups_to_come() -> None:
    metrics = ScoreMetrics()
    metrics.check([metric("Failed"), metric(rate=0.5)])
    metrics.check([metric(), metric()])
    with pytest.raises(InvalidRequest, match=r"of 'b' is 'rate'.*seen: none"):
        metrics.check([metric(tag="b"), metric(tag="b")])


def test_a_group_whose_episodes_all_failed_tells_nothing() -> None:
    metrics = ScoreMetrics()
    metrics.check([metric("Failed"), metric("Timeout", other=1)])
    with pytest.raises(InvalidRequest, match="seen: other, steps"):
        metrics.check([metric(other=1, text="no number"), metric("Failed", steps=2)])


def test_the_runners_own_score_needs_no_metric() -> None:
    ScoreMetrics().check([metric(name="binary"), metric(name="binary")])


def test_a_metric_is_a_score_if_it_is_a_finite_number() -> None:
    values: dict[str, Any] = {"a": np.float32(0.5), "b": True, "c": 3, "d": float("nan"), "e": "0.5", "f": None}
    assert {name: metric_value(values, name) for name in "abcdefg"} == {
        **{"a": 0.5, "b": 1.0, "c": 3.0},
        **dict.fromkeys("defg"),
    }
