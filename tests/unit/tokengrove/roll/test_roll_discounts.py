"""The scores of ROLL's managers against its formulas, computed here: raw, or discounted along the steps of an episode.

The steps of an episode are its turns in order. ROLL's return of a step is r_t + gamma r_(t+1) + ... within `traj_id`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support import real_server, user
from tests.unit.tokengrove.roll.roll_queues import Queue
from tests.wide import CROSSED, WIDE, few
from tokengrove.client import Client
from tokengrove.roll import AgentRunner, DataProto, EpisodeResult, ProxyEnvManager, Section
from tokengrove.roll.managers import (
    AgentNativeStepEnvManager,
    StepConcatEnvManager,
    StepEnvManager,
    TrajEnvManager,
)
from tokengrove.roll.runners import GEMRunner, ToolCallRunner

pytest.importorskip("gem")

ENV = "tests.unit.tokengrove.roll.roll_games:Paid"


class Forgetful(AgentRunner):
    """Asks with the current observation alone, as the runner of one's own that ROLL's documentation prints."""

    def run_job(self, seed: int) -> EpisodeResult:
        rewards = list(self.env_params["rewards"])
        with httpx.Client() as client:
            for text, _ in zip(self.env_params["observations"], rewards, strict=True):
                self._llm_request(client, [user(f"Say exactly: {text}")])
        return EpisodeResult("Finished", self.env_params.get("score", sum(rewards)), rewards)


@dataclass(frozen=True)
class Played:
    """How episodes are played. `joined`: the turns of an episode are one row."""

    manager: Any
    joined: bool
    runner: Any = None
    config: tuple[tuple[str, Any], ...] = ()


KINDS = {
    "TrajEnvManager": Played(TrajEnvManager, joined=True),
    "StepEnvManager": Played(StepEnvManager, joined=False),
    "StepConcatEnvManager": Played(StepConcatEnvManager, joined=False),
    "AgentNative": Played(AgentNativeStepEnvManager, joined=False, config=(("as_messages", True),)),
    "AgentNative forgets": Played(
        AgentNativeStepEnvManager, joined=False, config=(("as_messages", True), ("forgets", True))
    ),
    "GEMRunner": Played(ProxyEnvManager, joined=True, runner=GEMRunner),
    "GEMRunner steps": Played(ProxyEnvManager, joined=False, runner=GEMRunner, config=(("trajectory_mode", "step"),)),
    "ToolCallRunner": Played(ProxyEnvManager, joined=True, runner=ToolCallRunner, config=(("as_messages", True),)),
    "forgetful runner": Played(ProxyEnvManager, joined=False, runner=Forgetful),
    "forgetful runner steps": Played(
        ProxyEnvManager, joined=False, runner=Forgetful, config=(("trajectory_mode", "step"),)
    ),
}
SHAPES = {
    "one step": (["a"], [2.0]),
    "two steps": (["a", "b"], [-0.1, 10.9]),
    "three equal rewards": (["a", "b", "c"], [0.5, 0.5, 0.5]),
    "rewarded at the end": (["a", "b", "c", "d"], [0.0, 0.0, 0.0, 1.0]),
    "an observation comes back": (["a", "wall", "wall", "a"], [1.0, -0.25, 0.75, 1.0]),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of an open server, whose model says what it is told to."""
    with real_server(tmp_path_factory.mktemp("open"), engine_arg=("play=agent",)) as url, Client(url) as client:
        yield client


def played(client: Client, kind: Played, config: dict[str, Any], **pipeline: Any) -> DataProto:
    """The rollout of one episode."""
    entry = {
        **{"env_type": ENV, "tag": "Paid", "group_id": 3, "env_id": 7, "group_seed": 11, "max_steps": 10},
        **{"max_tokens_per_step": 16, "agent_runner_cls": kind.runner, "config": {**config, **dict(kind.config)}},
        "agent_template": "{current_observation}"
        if kind.manager in (StepEnvManager, StepConcatEnvManager)
        else "{observation}",
    }
    queue = Queue(1)
    kind.manager(
        worker_config=Section(generating_args={"max_new_tokens": 16}),
        pipeline_config=Section(exp_name="exp", sequence_length=768, custom_envs={"Paid": entry}, **pipeline),
        env_config=Section(entry),
        tokenizer=None,
        generate_scheduler=client,
        output_queue=queue,
    ).run_rollout_loop(DataProto(meta_info={"seed": 100}))
    [rollout] = queue.rollouts
    return rollout


def returns_of(rewards: Sequence[float], gamma: float) -> list[float]:
    """r_t + gamma r_(t+1) + gamma^2 r_(t+2) + ... of each step."""
    return [
        sum(gamma**distance * reward for distance, reward in enumerate(rewards[step:])) for step in range(len(rewards))
    ]


def close(values: Sequence[float]) -> Any:
    return pytest.approx(list(values), abs=1e-5)


@CROSSED
@pytest.mark.parametrize("shape", few(SHAPES, ("two steps", "an observation comes back")))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("gamma", "applied"), [(0.5, True), pytest.param(0.9, True, marks=WIDE), (0.0, True), (0.5, False)]
)
def test_scores_are_those_of_rolls_formulas(client: Client, kind: str, shape: str, gamma: float, applied: bool) -> None:
    how, (observations, rewards) = KINDS[kind], SHAPES[shape]
    config = {"observations": observations, "rewards": rewards}
    rollout = played(client, how, config, step_reward_gamma=gamma, apply_reward_discount=applied)
    returns, others, joined = returns_of(rewards, gamma), rollout.non_tensor_batch, how.joined
    is_step = not joined and (how.runner is None or ("trajectory_mode", "step") in how.config)
    raw = rewards if is_step else [sum(rewards)] * len(rewards)
    expected = returns if applied else raw
    scores = rollout.batch["scores"].sum(axis=1)
    assert scores == close(expected[:1] if joined else expected)
    assert rollout.batch["step_rewards"] == close(returns[-1:] if joined else returns)
    assert others["episode_scores"].tolist() == close([sum(rewards)] * len(rollout))
    given = others["step_scores"].tolist()
    assert np.concatenate([np.atleast_1d(each) for each in given]) == close(rewards)
    tree = client.session_tree(rollout.meta_info["session_id"])
    assert [node.reward for node in tree.interactions] == close(rewards)


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("kind", ["forgetful runner", "forgetful runner steps"])
def test_step_rewards_are_of_the_steps_whatever_the_episode_scores(client: Client, kind: str, applied: bool) -> None:
    config = {"observations": ["a", "b"], "rewards": [1.0, 2.0], "score": 5.0}
    rollout = played(client, KINDS[kind], config, step_reward_gamma=0.5, apply_reward_discount=applied)
    assert rollout.batch["step_rewards"] == close([2.0, 2.0])
    discounted, raw = ([2.0, 2.0], [1.0, 2.0]) if kind.endswith("steps") else ([3.0, 4.0], [5.0, 5.0])
    assert rollout.batch["scores"].sum(axis=1) == close(discounted if applied else raw)
    assert rollout.non_tensor_batch["episode_scores"].tolist() == close([5.0, 5.0])
