"""The end of an episode's session: it is sent whatever happened, and says what did."""

from __future__ import annotations

import logging

from tokengrove.client import operations
from tokengrove.client.exit_reason import exit_reason, storable
from tokengrove.client.options import EndOptions
from tokengrove.errors import InvalidRequest, ProxyError, SessionNotFound
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.episodes.failure import Failure

_logger = logging.getLogger(__name__)
CANCELLED = Failure("cancelled", "cancelled")


async def leave_session(episode: Episode, failure: Failure | None, within_s: float | None) -> Failure | None:
    """End the session, or delete it after a failure that is repeated (`plan.discard`). Return what has failed."""
    if failure is None or failure.kind not in episode.plan.discard:
        return await end_session(episode, failure, within_s)
    try:
        deletion = operations.delete_session(episode.session.session_id)
        await episode.client.run(deletion, retry_s=within_s)
    except SessionNotFound:
        pass  # an earlier attempt to delete it arrived
    except ProxyError as error:
        return _not_ended(episode, failure, error)
    return failure


async def end_session(episode: Episode, failure: Failure | None, within_s: float | None) -> Failure | None:
    """End the session, as Finished without a failure; try again for `within_s` seconds (None: as long as
    the client does) while the server is away.

    Return the failure, or that of the end: a session that could not be ended expires at the server.
    """
    try:
        await _end(episode, {**episode.ending, **_what_happened(failure)}, within_s)
        return failure
    except InvalidRequest as error:  # what the adapter says cannot be stored
        failure = failure or Failure("agent", exit_reason(error))
    except ProxyError as error:
        return _not_ended(episode, failure, error)
    try:
        await _end(episode, _what_happened(failure), within_s)
    except ProxyError as error:
        return _not_ended(episode, failure, error)
    return failure


async def _end(episode: Episode, options: EndOptions, within_s: float | None) -> None:
    await episode.session.end(retry_s=within_s, **options)


def _what_happened(failure: Failure | None) -> EndOptions:
    if failure is None:
        return {"outcome": "Finished"}
    told: EndOptions = {"outcome": failure.outcome, "exit_reason": storable(failure.message)}
    if failure.outcome == "Timeout":
        told["finished"] = False
    return told


def _not_ended(episode: Episode, failure: Failure | None, error: ProxyError) -> Failure:
    _logger.warning("session %s could not be ended: %s", episode.session.session_id, error)
    return failure or Failure("server", f"the session could not be ended: {exit_reason(error)}")
