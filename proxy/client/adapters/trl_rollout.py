"""TRL's `GRPOTrainer.rollout_func`: each prompt is played by an agent as one session, which gives one completion.

A completion begins with the first sampled token and holds everything after it. `env_mask` is 1 on the trained tokens,
so tool results and user turns are in the completion with mask 0.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from proxy.client.adapters.parts import as_json, prompt_length, score_of
from proxy.client.blocking_client import Client, Session
from proxy.client.values import Json, Sample
from proxy.errors import InvalidRequest

Agent = Callable[[Json, Session], None]
"""Plays one prompt (text or messages, as the dataset has it) at `session.base_url` with `session.api_key`, and sets the
session's reward."""


def completions(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """One row per sample, in the fields of TRL's rollout functions. C is the length of a completion.

    `prompt_ids`; `completion_ids` and `env_mask` (int) [C], `logprobs` (float, 0 outside of the mask) [C]; and for
    reward functions `session_reward` (the score of the session), `session_id`, `interaction_id`, `weight`, `advantage`.
    Raises InvalidRequest for a sample in which nothing was sampled.
    """
    rows = [_row(sample, score_of(sample)) for sample in samples]
    return {name: [row[name] for row in rows] for name in _FIELDS}


_FIELDS = (
    *("prompt_ids", "completion_ids", "logprobs", "env_mask"),
    *("session_reward", "session_id", "interaction_id", "weight", "advantage"),
)


def _row(sample: Sample, score: float) -> dict[str, Any]:
    start = prompt_length(sample)
    ids = sample.input_ids.tolist()
    values = (ids[:start], ids[start:], sample.logprobs[start:].tolist(), sample.loss_mask[start:].tolist())
    about = (score, sample.session_id, sample.interaction_id, sample.weight, sample.advantage)
    return dict(zip(_FIELDS, (*values, *about), strict=True))


def session_reward(*, session_reward: list[float], **_: Any) -> list[float]:
    """A reward function for GRPOTrainer: the rewards that the agents' sessions were given."""
    return session_reward


@dataclass(frozen=True)
class RolloutFunction:
    """A function for `GRPOTrainer(rollout_func=...)`; give it `session_reward` as `reward_funcs`.

    It starts one session for each entry of the prompts, in which TRL repeats a prompt for each of its generations, runs
    `agent` for at most `at_once` of them at a time in threads, and exports what they sampled. Sessions of equal prompts
    of one call have the same group. A session that forked gives its sample with the most trained tokens; the others are
    not trained. An exception of an agent ends the call. The server must serve the trainer's weights: push them with
    `Client.update_weights` after each step.
    """

    agent: Agent
    url: str
    admin_key: str | None = None
    task_id: str = "trl"
    at_once: int = 16

    def __call__(self, prompts: Sequence[Json], trainer: object) -> dict[str, list[Any]]:
        """Return the fields of `completions`, a row for each prompt. Raises InvalidRequest if one has no sample."""
        groups, run = [as_json(prompt) for prompt in prompts], uuid.uuid4().hex
        first = {group: groups.index(group) for group in groups}
        with Client(self.url, self.admin_key) as client:

            def play(place: int) -> str:
                group = f"{self.task_id}-{run}-{first[groups[place]]}"
                with client.session(self.task_id, group_id=group) as session:
                    self.agent(prompts[place], session)
                return session.session_id

            with ThreadPoolExecutor(self.at_once) as threads:
                sessions = list(threads.map(play, range(len(prompts))))
            samples = client.export(session_ids=sessions, layout="concat").samples if sessions else []
        chosen = _most_trained(samples)
        missing = [name for name in sessions if name not in chosen]
        if missing:
            raise InvalidRequest(f"session {missing[0]!r} has no sampled token, so it gives no completion")
        return completions([chosen[name] for name in sessions])


def _most_trained(samples: Sequence[Sample]) -> Mapping[str, Sample]:
    """By session the sample with the most trained tokens, the first of equals."""
    chosen: dict[str, Sample] = {}
    for sample in samples:
        before = chosen.get(sample.session_id)
        if before is None or sample.loss_mask.sum() > before.loss_mask.sum():
            chosen[sample.session_id] = sample
    return chosen
