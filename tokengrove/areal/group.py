"""The group of the episodes of a task: the caller that runs them sets it, and every session is started in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_group: ContextVar[str | None] = ContextVar("group", default=None)


def current_group() -> str | None:
    """The `group_id` of sessions that are started in this context; None without a group."""
    return _group.get()


@contextmanager
def group_set(group_id: str) -> Iterator[None]:
    """Put all sessions that are started in the block, and in tasks created in it, into one group."""
    token = _group.set(group_id)
    try:
        yield
    finally:
        _group.reset(token)
