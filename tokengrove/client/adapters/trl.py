"""TRL's asynchronous GRPO: samples as `RolloutSample`s, and a rollout worker that feeds TRL's trainer from claims.

Each session has one advantage, relative to the sessions with the same `group_id`. Every row of the session has this
advantage, as in TRL's own worker (`_AsyncRolloutLoop._score_group`): (s - mean) / (std + 1e-8), where s is the
session's score and std the population standard deviation, divided by n (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
As in TRL, a session without a reward is not counted and has advantage 0. With reward scope path, each path counts like
a session.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tokengrove.client.adapters import parts
from tokengrove.client.adapters.parts import Annotation, known_score, of_agent
from tokengrove.client.blocking_client import Client
from tokengrove.client.export import Claim
from tokengrove.client.libraries import library
from tokengrove.client.options import SessionFilter
from tokengrove.client.values import Sample
from tokengrove.errors import InvalidRequest, ProxyError

_EPSILON = 1e-8
# Longest wait for a claim, or for room in the buffer, before the worker checks whether it should stop. Seconds.
_WAIT_S = 2.0
# Errors that end the worker's thread; `check_health` reports them.
_FAULTS = (ProxyError, ArithmeticError, LookupError, TypeError, ValueError)


def advantages(rewards: Sequence[float | None]) -> list[float]:
    """The advantage of each rollout of one group. A reward of None does not count, and its advantage is 0."""
    scored = [reward for reward in rewards if reward is not None]
    if not scored:
        return [0.0] * len(rewards)
    centre, spread = float(np.mean(scored)), float(np.std(scored))
    return [0.0 if reward is None else (reward - centre) / (spread + _EPSILON) for reward in rewards]


def rollout_samples(samples: Iterable[Sample], group_ids: Mapping[str, int] | None = None) -> list[Any]:
    """Return the samples as TRL's `RolloutSample`s, group by group, without samples that have no trained token.

    `input_ids`, `completion_mask` int64 [L], `old_log_probs` float32 [L]. `model_version` is the oldest weight version
    that sampled a trained token. `group_ids` numbers the groups, by default from 0. A session without a `group_id` is a
    group of its own. A session counts once in its group, however many samples it has. `prompt` and `completion`, which
    TRL only displays, are the messages if the export included them. Raises InvalidRequest if trl is not installed, and
    for a sample with images: TRL's asynchronous GRPO does not support them, and would train on image tokens without the
    images.
    """
    kind = library("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        _refuse_images(sample)
        groups[_group(sample)].append(sample)
    rows = []
    for number, (name, members) in enumerate(groups.items()):
        scores = {_rollout(member): known_score(member) for member in members}
        compared = dict(zip(scores, advantages(list(scores.values())), strict=True))
        spread = float(np.std([score for score in scores.values() if score is not None] or [math.nan]))
        group_id = number if group_ids is None else group_ids[name]
        trained = [member for member in members if member.loss_mask.any()]
        rows += [kind(**_fields(each, compared[_rollout(each)], spread), group_id=group_id) for each in trained]
    return rows


def annotation(samples: Iterable[Sample], batch: Mapping[str, Any]) -> Annotation:
    """Arguments of `client.annotate` from values of the trainer, one row for each of `rollout_samples(samples)`.

    Streams from [B, L - 1], whose column t is for token t + 1: `logprobs` (`log_probs`), `entropy` (`entropies`),
    `importance_weight` (`importance_sampling_ratio`). Raises InvalidRequest without any of these.
    """
    names = {"log_probs": "logprobs", "entropies": "entropy", "importance_sampling_ratio": "importance_weight"}
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[_group(sample)].append(sample)
    rows = [member for members in groups.values() for member in members if member.loss_mask.any()]
    return parts.annotation(rows, batch, names, "next")


def _refuse_images(sample: Sample) -> None:
    if sample.images:
        raise InvalidRequest(
            f"sample {sample.interaction_id!r} has images, which TRL's RolloutSample cannot hold; train it with "
            "GRPOTrainer (tokengrove.client.adapters.trl_rollout.training_batch), verl, AReaL or ROLL",
            param="samples",
        )


def _group(sample: Sample) -> str:
    return of_agent(sample, sample.group_id or sample.session_id)


def _rollout(sample: Sample) -> tuple[str, ...]:
    """What counts once in a group: the session (of one agent, by `_group`) or, with reward scope path, the path."""
    return (sample.session_id, sample.interaction_id) if sample.reward_scope == "path" else (sample.session_id,)


def _fields(sample: Sample, advantage: float, reward_std: float) -> dict[str, Any]:
    messages: list[Any] = [message for turn in sample.turns for message in turn.get("messages") or ()]
    return {
        "prompt": messages[:-1],
        "completion": messages[-1:],
        "input_ids": sample.input_ids.astype(np.int64),
        "completion_mask": sample.loss_mask.astype(np.int64),
        "old_log_probs": sample.logprobs.astype(np.float32),
        "advantage": advantage,
        "model_version": int(sample.versions[sample.loss_mask > 0].min()),
        "metrics": {"reward": math.nan if sample.score is None else sample.score, "reward_std": reward_std},
    }


class ClaimingWorker:
    """TRL's RolloutWorkerProtocol on top of claims: passes ended sessions to the trainer, whatever ran the agents.

    A thread claims whole groups: groups of `group_size` sessions that have all ended. It puts their rows on
    `rollout_buffer`, which holds at most `buffer_size`, and then acknowledges the group. If a worker dies, the next
    worker claims its sessions again. A session without a `group_id` is a group of its own.
    """

    def __init__(
        self,
        url: str,
        admin_key: str | None = None,
        *,
        group_size: int,
        buffer_size: int = 1024,
        lease_s: float = 600.0,
        consumer: str = "trl",
        filter: SessionFilter | None = None,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(buffer_size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.model_version = 0
        self._client = Client(url, admin_key)
        self._group_size, self._lease_s = group_size, lease_s
        self._consumer = consumer
        self._filter = filter
        self._numbers: dict[str, int] = {}
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._beat = self._renewed = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tokengrove-claims", daemon=True)

    def start(self) -> None:
        """Start claiming."""
        self._beat = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and release sessions that are claimed but not yet in the buffer. May be called repeatedly."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def update_model_version(self, model_version: int) -> None:
        """Set the trainer's weight version, for the version lag in the metrics. Rows have their own versions."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if the thread has failed, or has done nothing for `stale_after_s` seconds."""
        if self._failure is not None:
            raise RuntimeError(f"claiming from {self._client.url} failed: {self._failure}") from self._failure
        age = time.monotonic() - self._beat
        if age > stale_after_s:
            raise RuntimeError(
                f"the worker for {self._client.url} has done nothing for {age:.0f} s (limit {stale_after_s:.0f} s)"
            )

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._beat = time.monotonic()
                claim = self._claim()
                if claim.claim_id is not None and claim.export is not None:
                    self._deliver(claim.claim_id, claim.sessions, claim.export.samples)
        except _FAULTS as failure:
            self._failure = failure

    def _claim(self) -> Claim:
        self._renewed = time.monotonic()
        return self._client.claim(
            limit=self._group_size,
            group_size=self._group_size,
            lease_s=self._lease_s,
            wait_s=min(_WAIT_S, self._lease_s / 4),
            consumer=self._consumer,
            export={"layout": "concat"},
            filter=self._filter,
        )

    def _deliver(self, claim_id: str, sessions: Iterable[str], samples: Sequence[Sample]) -> None:
        """Put the groups of a claim in the buffer and acknowledge them; release the rest if the worker is stopped."""
        groups: dict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            groups[_group(sample)].append(sample)
        for group, members in groups.items():
            number = self._numbers.setdefault(group, len(self._numbers))
            rows = rollout_samples(members, {group: number})
            if not all(self._put(row, claim_id) for row in rows):
                self._client.claim(claim_id=claim_id, renew=True, lease_s=0.0)
                return
            self._client.acknowledge(claim_id, sorted({member.session_id for member in members}))
            lags = [self.model_version - row.model_version for row in rows]
            self.metrics_queue.put({"rollout/version_lag": float(np.mean(lags or [0.0]))})
        if without := set(sessions) - {sample.session_id for sample in samples}:
            self._client.acknowledge(claim_id, sorted(without))

    def _put(self, row: Any, claim_id: str) -> bool:
        """Put a row in the buffer, waiting for room. Return False if the worker is stopped meanwhile."""
        while not self._stop.is_set():
            try:
                row.enqueued_at = time.time()
                self.rollout_buffer.put(row, timeout=min(_WAIT_S, self._lease_s / 4))
                return True
            except queue.Full:
                self._beat = time.monotonic()
                self._renew(claim_id)
        return False

    def _renew(self, claim_id: str) -> None:
        """Renew the lease while rows wait for room in the buffer."""
        if time.monotonic() >= self._renewed + self._lease_s / 3:
            self._renewed = time.monotonic()
            self._client.claim(claim_id=claim_id, renew=True, lease_s=self._lease_s)
