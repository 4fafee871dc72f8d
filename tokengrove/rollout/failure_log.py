"""Failed episodes of a run: warnings, counts, and the end of the run after too many failures in a row.

The first failure of each type of error is logged in full, with its traceback. After it, the 2nd, 4th, 8th and so on are
logged in one line with the count. Callers decide when an episode has failed. A successful episode resets the number of
failures in a row.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from traceback import format_exception
from typing import Any, Self

from tokengrove.client.exit_reason import exit_reason, without_keys
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.failures import AgentFailed

_logger = logging.getLogger(__name__)
GROUPS = 3
"""The default limit of failed episodes in a row, as a number of groups."""
NO_END = -1
"""The value of `max_failed_episodes` for no limit."""
_SHOWN = 300
"""The maximum number of characters of a message in a line with a count, and in the error that ends a run."""


@dataclass(frozen=True, slots=True)
class FailedEpisode:
    """`type`: the class of the exception, or without one how the episode ended (`Failed`, `Timeout`, ...).

    `session`: the id of its session; None: no session was started. `traceback`: the traceback of the exception, as
    text.
    """

    type: str
    message: str
    task: str
    session: str | None = None
    traceback: str = ""

    @classmethod
    def by(cls, error: BaseException, task: object, session: str | None = None) -> Self:
        """The failure of an episode that an exception ended."""
        if isinstance(error, AgentFailed):
            return cls(error.kind, error.message, str(task), session, without_keys(error.traceback))
        name = type(error).__name__
        return cls(name, exit_reason(error).removeprefix(f"{name}: "), str(task), session, traceback_of(error))

    @classmethod
    def told_in(cls, meta_info: Mapping[str, Any]) -> Self | None:
        """The failure in a rollout's `meta_info`, stored there by `as_dict`; None: the episode has not failed."""
        told = meta_info.get("failure")
        return None if told is None else cls(**told)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)

    @property
    def place(self) -> str:
        """The task and the session of the episode, for messages."""
        return f"task {self.task}" + ("" if self.session is None else f", session {self.session}")


class TooManyFailedEpisodes(RuntimeError):
    """Too many episodes in a row have failed, so the run ends. `counts`: the number of these failures by type."""

    def __init__(self, message: str, counts: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.counts = counts or {}


class FailureLog:
    """The failed episodes of a run. Thread-safe.

    `most`: the number of failures in a row after which `note` raises; None: the episodes of three groups of
    `group_size`, which may change during the run; -1: never. `of`: the name of an episode in log messages. `episodes`,
    `total` and `counts` (by type) cover the whole run. Raises InvalidRequest for an invalid `most`.
    """

    def __init__(self, most: int | None = None, group_size: int = 1, of: str = "an episode") -> None:
        self._given, self.group_size, self._of = checked_most(most), group_size, of
        self.episodes = 0
        self.counts: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._examples: dict[str, FailedEpisode] = {}
        self._lock = threading.Lock()

    def set_most(self, most: int | None, group_size: int) -> None:
        """Replace the limit unless `most` is None, and raise the group size to at least `group_size`."""
        given = checked_most(most)
        self._given = self._given if given is None else given
        self.group_size = max(self.group_size, group_size)

    @property
    def most(self) -> int | None:
        """The number of failed episodes in a row that ends the run; None: no limit."""
        if self._given is None:
            return GROUPS * self.group_size
        return None if self._given == NO_END else self._given

    @property
    def total(self) -> int:
        return self.counts.total()

    def note(self, failure: FailedEpisode | None) -> None:
        """Note the end of an episode; None: it has not failed.

        Raises TooManyFailedEpisodes, with the number and an example of each type, if the limit is reached.
        """
        with self._lock:
            self.episodes += 1
            if failure is None:
                self._in_a_row.clear()
                return
            self.counts[failure.type] += 1
            self._in_a_row[failure.type] += 1
            if self._in_a_row[failure.type] == 1:
                self._examples[failure.type] = failure
            count, in_a_row, most = self.counts[failure.type], self._in_a_row.copy(), self.most
            if not count & (count - 1):
                # Inside the lock, so that lines are in the order of counts. No template, because filters that
                # deduplicate by template would drop other types.
                _logger.warning(self._line(failure, count))
        if most is not None and in_a_row.total() >= most:
            raise TooManyFailedEpisodes(self._reasons(in_a_row), dict(in_a_row))

    def _line(self, failure: FailedEpisode, count: int) -> str:
        if count > 1:
            message = _cut(failure.message)
            return f"{self._of} failed: {failure.type}, {count} times by now, last {failure.place}: {message}"
        traceback = f"\n{failure.traceback.rstrip()}" if failure.traceback else ""
        return f"{self._of} failed: {failure.type}: {failure.message} ({failure.place}){traceback}"

    def _reasons(self, in_a_row: Counter[str]) -> str:
        told = "; ".join(
            f"{count} x {kind}, such as {self._examples[kind].place}: {_cut(self._examples[kind].message)}"
            for kind, count in in_a_row.most_common()
        )
        return f"{in_a_row.total()} episodes in a row have failed (max_failed_episodes is {self.most}): {told}"


def checked_most(most: Any, name: str = "max_failed_episodes") -> int | None:
    """Return `most`. Raises InvalidRequest unless it is None, a positive integer, or -1."""
    if most is None or (isinstance(most, int) and not isinstance(most, bool) and (most > 0 or most == NO_END)):
        return most
    raise InvalidRequest(
        f"{name} is {most!r}; it must be a positive integer, -1 for no limit, or null for {GROUPS} groups",
        param=name,
    )


def traceback_of(error: BaseException) -> str:
    """The traceback of a raised exception, with the keys in addresses removed; empty without a traceback."""
    if error.__traceback__ is None and error.__cause__ is None:
        return ""
    try:
        return without_keys("".join(format_exception(error)))
    except Exception as failure:  # an exception class that cannot be formatted
        return f"the traceback cannot be formatted: {type(failure).__name__}"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
