"""Ends an episode's session with its outcome and reason."""

from __future__ import annotations

from tokengrove.client.exit_reason import exit_reason, storable
from tokengrove.client.options import EndOptions, WithdrawOptions
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.episodes.failure import Failure

CANCELLED = Failure("cancelled", "cancelled")


async def leave_session(episode: Episode, failure: Failure | None, within_s: float | None) -> Failure | None:
    """End the session, or withdraw it if its failure will be retried (`plan.discard`). Return the failure.

    `within_s`: seconds of retries; None: the client's default. If a session without a failure cannot be ended, the
    failure is `server`.
    """
    if failure is None or failure.kind not in episode.plan.discard:
        return await end_session(episode, failure, within_s)
    told: WithdrawOptions = {"outcome": failure.outcome, "exit_reason": storable(failure.message)}
    try:
        await episode.withdraw(within_s, **told)
    except ProxyError as error:
        return _not_ended(episode, failure, error)
    return failure


async def end_session(episode: Episode, failure: Failure | None, within_s: float | None) -> Failure | None:
    """End the session, as Finished without a failure.

    `within_s`: seconds of retries; None: the client's default. Return the failure, or that of the end: a session that
    could not be ended expires on the server.
    """
    try:
        told: EndOptions = {**episode.ending, **_what_happened(failure)}
        await episode.end(within_s, **told)
        return failure
    except InvalidRequest as error:  # the server refuses fields of the adapter
        failure = failure or Failure("agent", exit_reason(error))
    except ProxyError as error:
        return _not_ended(episode, failure, error)
    try:
        await episode.end(within_s, **_what_happened(failure))
    except ProxyError as error:
        return _not_ended(episode, failure, error)
    return failure


def _what_happened(failure: Failure | None) -> EndOptions:
    if failure is None:
        return {"outcome": "Finished"}
    told: EndOptions = {"outcome": failure.outcome, "exit_reason": storable(failure.message)}
    if failure.outcome == "Timeout":
        told["finished"] = False
    return told


def _not_ended(episode: Episode, failure: Failure | None, error: ProxyError) -> Failure:
    episode.not_ended(error)
    return failure or Failure("server", f"the session could not be ended: {exit_reason(error)}")
