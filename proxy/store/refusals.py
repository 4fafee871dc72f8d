"""Errors of a session that may not start now. They are raised before a start is queued and again in its transaction."""

from __future__ import annotations

from tokengrove.errors import TooManyRequests

# A refused start may succeed once other sessions have ended, which takes a while.
_RETRY_AFTER_S = 5.0


def too_many_live(most: int) -> TooManyRequests:
    """As many sessions are live as `--max-live-sessions` allows."""
    return TooManyRequests(
        f"{most} sessions are live (--max-live-sessions); end one first", retry_after_s=_RETRY_AFTER_S
    )


def too_stale(most: int) -> TooManyRequests:
    """A new session would be older than `--max-staleness` weight versions when it is trained on."""
    return TooManyRequests(
        f"{most} sessions are live or accepted, as many as --max-staleness and --batch-size allow; "
        "try again after the next weight update",
        retry_after_s=_RETRY_AFTER_S,
    )


def no_capacity() -> TooManyRequests:
    """Under `--capacity-control`, every granted start is taken."""
    return TooManyRequests(
        "no capacity is left (--capacity-control); grant more with POST /rl/grant_capacity",
        retry_after_s=_RETRY_AFTER_S,
    )
