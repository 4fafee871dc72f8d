"""Retry rules for a request that equals an earlier one, so that no retry is sampled or trained twice.

| earlier attempt                  | marked retry                 | unmarked request             |
|----------------------------------|------------------------------|------------------------------|
| running, a client reads it       | attach                       | new sample                   |
| running, its client disconnected | attach                       | attach                       |
| failed or aborted before commit  | new sample, replacing it     | new sample, replacing it     |
| committed, reply never written   | replay                       | replay                       |
| committed, reply written         | replay                       | new sample                   |

A retry is marked by the header `x-stainless-retry-count` above 0, which selects the newest equal attempt, or by an
Idempotency-Key, which selects the attempt with that key. A failed attempt that has not been replaced takes precedence,
because clients retry failures. A reply with only some of its choices committed is not replayed. A reply that another
replica may still be writing counts as written. The rules for running attempts apply within one server, including its
workers, which forward such requests to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.sessions.attempts import Attempt, Stage
from proxy.types import TurnRequest


@dataclass(frozen=True, slots=True)
class Attach:
    """Read the attempt that is already running."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Replay:
    """Replay the committed interactions of this attempt."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class NewSample:
    """Sample a new attempt, which replaces the failed or ending attempts in `superseded`."""

    superseded: Sequence[Attempt]


Decision = Attach | Replay | NewSample
FIRST = NewSample(())
"""The decision for a request that no attempt equals."""


def is_retry(request: TurnRequest) -> bool:
    """True if the client marks the request as one that it may have sent before."""
    return request.retry or request.idempotency_key is not None


def decide(attempts: Sequence[Attempt], request: TurnRequest) -> Decision:
    """Apply the rules above. `attempts`: the attempts of the session with the request's hash, oldest first."""
    if not attempts:
        return FIRST
    repeated = marked(attempts, request)
    gone = [a for a in attempts if a.readers == 0 and not (a.written or a.unsettled)]
    failed = [a for a in attempts if a.stage in (Stage.FAILED, Stage.ENDING) and not a.superseded]
    if failed and (failed[-1] in repeated or not repeated):
        return NewSample(failed)
    for attempt in (*reversed(repeated), *reversed(gone)):
        if attempt.stage is Stage.RUNNING:
            return Attach(attempt)
        if attempt.stage is Stage.COMPLETE and len(attempt.interactions) == request.n:
            return Replay(attempt)
    return NewSample(failed)


def marked(attempts: Sequence[Attempt], request: TurnRequest) -> list[Attempt]:
    """The attempts that the marks of the request select, in their order."""
    key, retry = request.idempotency_key, request.retry
    if key is None:
        return list(attempts) if retry else []
    return [a for a in attempts if (retry if a.idempotency_key is None else a.idempotency_key == key)]
