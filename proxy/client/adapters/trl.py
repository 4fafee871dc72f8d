"""TRL's asynchronous GRPO: exports as its `RolloutSample`s, and a worker that feeds its trainer from our queue.

Advantages are relative to the group of a session, one a session, stamped on each of its rows as TRL's own worker does:
(r - mean) / (std + 1e-8) with the population's std (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from proxy.client.adapters.parts import group_of
from proxy.client.clients import Client
from proxy.client.libraries import library
from proxy.client.options import SessionFilter
from proxy.client.values import Claim, Sample
from proxy.errors import ProxyError

_EPSILON = 1e-8
# How long a claim waits, and how long a full queue is waited for, before the worker looks whether it should stop.
_WAIT_S = 2.0
# What may go wrong in the worker's thread, besides a fault of ours: it is kept, and told by `check_health`.
_FAULTS = (ProxyError, ArithmeticError, LookupError, TypeError, ValueError)


def advantages(rewards: Mapping[str, float]) -> dict[str, float]:
    """The advantage of each session of one group, from the rewards of its sessions by session id."""
    values = list(rewards.values())
    centre, spread = float(np.mean(values)), float(np.std(values))
    return {name: (reward - centre) / (spread + _EPSILON) for name, reward in rewards.items()}


def rollout_samples(samples: Iterable[Sample], group_ids: Mapping[str, int] | None = None) -> list[Any]:
    """Samples as TRL's `RolloutSample`s, group by group; those without a trained token are left out.

    `input_ids`, `completion_mask` int64 [L], `old_log_probs` float32 [L]. `model_version` is the oldest that sampled a
    trained token. `group_ids` numbers the groups, by default from 0. A session counts once in its group, with the mean
    reward of its samples. `prompt` and `completion`, which TRL only shows, are the messages where the export included
    them. Raises InvalidRequest without trl.
    """
    kind = library("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[group_of(sample)].append(sample)
    rows = []
    for number, (name, members) in enumerate(groups.items()):
        rewards = _rewards(members)
        of_session, spread = advantages(rewards), float(np.std(list(rewards.values())))
        group_id = number if group_ids is None else group_ids[name]
        trained = [member for member in members if member.loss_mask.any()]
        rows += [kind(**_fields(each, of_session[each.session_id], spread), group_id=group_id) for each in trained]
    return rows


def _rewards(samples: Sequence[Sample]) -> dict[str, float]:
    """By session id the mean reward of its samples."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        rewards[sample.session_id].append(float(sample.rewards[0]))
    return {name: float(np.mean(values)) for name, values in rewards.items()}


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
        "metrics": {"reward": float(sample.rewards[0]), "reward_std": reward_std},
    }


class ClaimingWorker:
    """TRL's RolloutWorkerProtocol on our queue: whoever runs the agents, this hands what they did to the trainer.

    A thread claims ended sessions, waits until `group_size` of a group are there, and puts their rows on
    `rollout_buffer`, of at most `buffer_size`. A group is acknowledged when its rows are on the buffer; what a dead
    worker held is claimed again by the next one.
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
        self._wanted: SessionFilter = filter or {}
        self._held: dict[str, set[str]] = {}
        self._groups: dict[str, dict[str, list[Sample]]] = defaultdict(dict)
        self._numbers: dict[str, int] = {}
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._beat = self._renewed = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="tokengrove-claims", daemon=True)

    def start(self) -> None:
        """Begin to claim."""
        self._beat = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is claimed and not on the buffer goes back to the queue. May be called again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def update_model_version(self, model_version: int) -> None:
        """Rows carry the versions that sampled them; the trainer drops what is too old. This is for the metrics."""
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError when the thread has failed, or done nothing for `stale_after_s` seconds."""
        if self._failure is not None:
            raise RuntimeError(f"claiming from {self._client.url} has failed: {self._failure}") from self._failure
        age = time.monotonic() - self._beat
        if age > stale_after_s:
            raise RuntimeError(f"nothing came from {self._client.url} for {age:.0f}s > {stale_after_s:.0f}s")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._beat = time.monotonic()
                self._renew()
                self._take(self._claim())
                self._deliver()
            self._give_back()
        except _FAULTS as failure:
            self._failure = failure

    def _claim(self) -> Claim:
        return self._client.claim(
            limit=self._group_size,
            lease_s=self._lease_s,
            wait_s=min(_WAIT_S, self._lease_s / 4),
            consumer=self._consumer,
            export={"layout": "concat"},
            **self._wanted,
        )

    def _take(self, claim: Claim) -> None:
        """Sort what was claimed into groups; a session without a sample is done with at once."""
        if claim.claim_id is None or claim.export is None:
            return
        self._held[claim.claim_id] = set(claim.sessions)
        of_session: dict[str, list[Sample]] = {name: [] for name in claim.sessions}
        for sample in claim.export.samples:
            of_session[sample.session_id].append(sample)
        self._done([name for name, samples in of_session.items() if not samples])
        for name, samples in of_session.items():
            if samples:
                self._groups[group_of(samples[0])][name] = samples

    def _deliver(self) -> None:
        """Put whole groups on the buffer, and acknowledge them."""
        for group in [name for name, members in self._groups.items() if len(members) >= self._group_size]:
            members = self._groups[group]
            samples = [sample for of_one in members.values() for sample in of_one]
            number = self._numbers.setdefault(group, len(self._numbers))
            rows = rollout_samples(samples, {group: number})
            if not all(self._put(row) for row in rows):
                return
            del self._groups[group]
            self._done(list(members))
            lags = [self.model_version - row.model_version for row in rows]
            self.metrics_queue.put({"rollout/version_lag": float(np.mean(lags or [0.0]))})

    def _put(self, row: Any) -> bool:
        """Wait for room on the buffer; False when told to stop meanwhile."""
        while not self._stop.is_set():
            try:
                row.enqueued_at = time.time()
                self.rollout_buffer.put(row, timeout=min(_WAIT_S, self._lease_s / 4))
                return True
            except queue.Full:
                self._beat = time.monotonic()
                self._renew()
        return False

    def _done(self, sessions: Sequence[str]) -> None:
        for claim_id, names in list(self._held.items()):
            if done := names & set(sessions):
                self._client.acknowledge(claim_id, sorted(done))
                names -= done
            if not names:
                del self._held[claim_id]

    def _renew(self) -> None:
        """Keep the leases of sessions that wait for their group."""
        if time.monotonic() < self._renewed + self._lease_s / 3:
            return
        self._renewed = time.monotonic()
        for claim_id, names in list(self._held.items()):
            kept = set(self._client.claim(claim_id=claim_id, renew=True, lease_s=self._lease_s).sessions)
            self._forget(names - kept)
            names &= kept

    def _forget(self, lost: set[str]) -> None:
        """Sessions that others have claimed since are theirs to train."""
        for members in self._groups.values():
            for name in lost & members.keys():
                del members[name]

    def _give_back(self) -> None:
        for claim_id in self._held:
            self._client.claim(claim_id=claim_id, renew=True, lease_s=0.0)
