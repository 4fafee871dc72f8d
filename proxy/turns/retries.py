"""What becomes of a request that was made before: DESIGN's table, so that no retry is sampled or trained twice.

| the earlier attempt                      | marked  | unmarked     |
| in flight, its client is there           | attach  | a new sample |
| in flight, its client is gone            | attach  | attach       |
| failed or aborted before its commit      | anew, the old one superseded |
| committed, its end was never written out | replay  | replay       |
| committed and written                    | replay  | a new sample |

Marked: the client says that it is a retry (then the newest earlier attempt is meant), or its Idempotency-Key is an
earlier attempt's (then that one is). A failed attempt that nothing has replaced yet comes first: it is what a client
would retry. In-flight rules hold for one server process. A reply of which only some choices are there is none, and one
that another replica may be writing out counts as written.
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
    """Give the committed interactions of this attempt again."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Anew:
    """Sample; `superseded` are failed or ending attempts that this one replaces."""

    superseded: Sequence[Attempt]


def decide(attempts: Sequence[Attempt], request: TurnRequest) -> Attach | Replay | Anew:
    """The rule for a request. `attempts` are those with its hash in its session, oldest first."""
    marked = [a for a in attempts if _is_marked(request, a)]
    gone = [a for a in attempts if a.readers == 0 and not (a.written or a.unsettled)]
    failed = [a for a in attempts if a.stage in (Stage.FAILED, Stage.ENDING) and not a.superseded]
    if failed and (failed[-1] in marked or not marked):
        return Anew(failed)
    for attempt in (*reversed(marked), *reversed(gone)):
        if attempt.stage is Stage.RUNNING:
            return Attach(attempt)
        if attempt.stage is Stage.COMPLETE and len(attempt.interactions) == request.n:
            return Replay(attempt)
    return Anew(failed)


def _is_marked(request: TurnRequest, attempt: Attempt) -> bool:
    if request.idempotency_key is not None and attempt.idempotency_key is not None:
        return request.idempotency_key == attempt.idempotency_key
    return request.retry
