"""Ends the session of a failed attempt, for the episode, its executor, or the run.

A claim takes a group as soon as enough of its sessions have ended, with any outcome. The session of an attempt that
will be retried must not end in its group, so it is withdrawn.
"""

from __future__ import annotations

import logging

from tokengrove.client import AsyncClient
from tokengrove.client.exit_reason import storable
from tokengrove.client.operations import Call, Steps, session_path, withdraw_session
from tokengrove.errors import EndedOtherwise, ProxyError, SessionNotFound
from tokengrove.rollout.episodes.plan import EpisodePlan
from tokengrove.rollout.episodes.result import FailureKind

logger = logging.getLogger(__name__)
_WITHIN_S = 30.0


async def give_up(client: AsyncClient, plan: EpisodePlan, failure: FailureKind, message: str) -> bool:
    """End the session of `plan` as Timeout or Failed, with `message` as its exit reason.

    If `failure` is in `plan.discard`, the session is withdrawn, live or ended. Otherwise an ended session is left
    unchanged. A session that was never started is ignored. Return False if the server did not confirm this within 30 s;
    the session may then still be live.
    """
    try:
        await client.run(_left(plan, failure, message), retry_s=_WITHIN_S)
    except (SessionNotFound, EndedOtherwise):
        return True
    except ProxyError as error:
        logger.warning("session %s could not be ended after its attempt failed: %s", plan.session_id, error)
        return False
    return True


def _left(plan: EpisodePlan, failure: FailureKind, message: str) -> Steps[None]:
    outcome, reason = "Timeout" if failure == "timeout" else "Failed", storable(message)
    if failure in plan.discard:
        yield from withdraw_session(plan.session_id, {"outcome": outcome, "exit_reason": reason})
    else:
        yield from _end(plan.session_id, outcome, reason)


def _end(session_id: str, outcome: str, reason: str) -> Steps[None]:
    """End a session by its id, with the client's own key: the session's keys may be lost with a process."""
    body = {"outcome": outcome, "exit_reason": reason}
    yield Call("POST", f"/{session_path(session_id)}/rl/end_session", body)
