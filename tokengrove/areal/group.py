"""The group that the episodes of a task belong to: whoever runs them sets it, and each session is started in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_group: ContextVar[str | None] = ContextVar("group", default=None)


def current_group() -> str | None:
    """The `group_id` of the sessions that start here; None without a group."""
    return _group.get()


@contextmanager
def group_set(group_id: str) -> Iterator[None]:
    """Let the sessions that are started in the block, and in the tasks that are created in it, be of one group."""
    token = _group.set(group_id)
    try:
        yield
    finally:
        _group.reset(token)
