"""The certificate of a session: whether its export is complete, and counts of everything that is not in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.types import Interaction, SessionRecord
from tokengrove.reasons import Status


def certificate(record: SessionRecord, interactions: Sequence[Interaction], begun_not_ended: int = 0) -> dict[str, Any]:
    """A session's entry in an export. `complete` is False if calls failed, were aborted or began and never ended.

    `unaligned` counts interactions whose prompt does not begin with their parent's tokens; `reasons` counts complete
    interactions by reason.
    """
    counts = {status: sum(i.status is status for i in interactions) for status in Status}
    complete = [i for i in interactions if i.status is Status.COMPLETE]
    reasons: dict[str, int] = {}
    for interaction in complete:
        reasons[interaction.reason.value] = reasons.get(interaction.reason.value, 0) + 1
    lost = begun_not_ended + counts[Status.FAILED] + counts[Status.ABORTED]
    return {
        "session_id": record.session_id,
        "group_id": record.group_id,
        "task_id": record.task_id,
        "status": record.status.value,
        "complete": lost == 0,
        "begun_not_ended": begun_not_ended,
        "aborted": counts[Status.ABORTED],
        "superseded": counts[Status.SUPERSEDED],
        "failed": counts[Status.FAILED],
        "reasons": reasons,
        "unaligned": sum(i.parent_id is not None and not i.aligned for i in complete),
        "rewarded": any(i.reward is not None or i.rewards or i.token_rewards for i in complete),
        "outcome": record.outcome.value if record.outcome else None,
        "finished": record.finished,
        "metrics": dict(record.metrics),
        "metadata": dict(record.metadata),
    }
