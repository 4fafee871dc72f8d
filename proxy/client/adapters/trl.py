"""TRL's asynchronous GRPO: samples as its `RolloutSample`s, and a rollout worker that feeds its trainer from claims.

Each session has one advantage, relative to its group; every row of the session carries it, as in TRL's own worker:
(r - mean) / (std + 1e-8) with the population standard deviation (DeepSeekMath, arXiv 2402.03300, section 4.1.2).
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
# Longest wait of a claim, or for room on the buffer, before the worker checks whether it should stop. Seconds.
_WAIT_S = 2.0
# Errors that end the worker's thread; `check_health` reports them.
_FAULTS = (ProxyError, ArithmeticError, LookupError, TypeError, ValueError)


def advantages(rewards: Mapping[str, float]) -> dict[str, float]:
    """Return the advantage of each session of one group, from the rewards by session id."""
    values = list(rewards.values())
    centre, spread = float(np.mean(values)), float(np.std(values))
    return {name: (reward - centre) / (spread + _EPSILON) for name, reward in rewards.items()}


def rollout_samples(samples: Iterable[Sample], group_ids: Mapping[str, int] | None = None) -> list[Any]:
    """Return the samples as TRL's `RolloutSample`s, group by group, without those that train no token.

    `input_ids`, `completion_mask` int64 [L], `old_log_probs` float32 [L]. `model_version` is the oldest weight version
    that sampled a trained token. `group_ids` numbers the groups, by default from 0. A session counts once in its group,
    with the mean reward of its samples. `prompt` and `completion`, which TRL only displays, are the messages if the
    export included them. Raises InvalidRequest without trl.
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
    """The mean reward of each session's samples, by session id."""
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
    """TRL's RolloutWorkerProtocol on top of claims: it hands finished sessions to the trainer, whatever ran the agents.

    A thread claims ended sessions, waits until a group has `group_size` of them, and puts their rows on
    `rollout_buffer`, which holds at most `buffer_size`. A group is acknowledged when its rows are on the buffer; the
    sessions of a worker that dies are claimed again by the next one.
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
        """Start claiming."""
        self._beat = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and give back what is claimed but not yet on the buffer. May be called again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()

    def update_model_version(self, model_version: int) -> None:
        """Set the trainer's weight version, for the version lag in the metrics. Rows carry their own versions."""
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
        """Sort the claimed sessions into groups; acknowledge a session without samples at once."""
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
        """Put complete groups on the buffer and acknowledge them."""
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
        """Put a row on the buffer, waiting for room. Return False if the worker is stopped meanwhile."""
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
        """Renew the leases of sessions that wait for their group."""
        if time.monotonic() < self._renewed + self._lease_s / 3:
            return
        self._renewed = time.monotonic()
        for claim_id, names in list(self._held.items()):
            kept = set(self._client.claim(claim_id=claim_id, renew=True, lease_s=self._lease_s).sessions)
            self._forget(names - kept)
            names &= kept

    def _forget(self, lost: set[str]) -> None:
        """Forget sessions whose lease was lost: another consumer trains them."""
        for members in self._groups.values():
            for name in lost & members.keys():
                del members[name]

    def _give_back(self) -> None:
        for claim_id in self._held:
            self._client.claim(claim_id=claim_id, renew=True, lease_s=0.0)
