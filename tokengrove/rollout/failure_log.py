"""Episodes that fail, as everybody who plays some tells them: a warning, a count, and the end of the run.

The first episode that fails with a type of error is logged as a whole, with its traceback; after it the 2nd, the 4th,
the 8th and so on are, in a line with the count. Whoever plays decides what a failed episode is; one that went well
begins the count of those in a row anew.
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
"""So many groups' worth of failed episodes in a row end a run, unless it is told otherwise."""
NO_END = -1
"""The number that lets a run go on however many episodes fail."""
_SHOWN = 300
"""Characters of a message that a line with a count, or the error at the end, has."""


@dataclass(frozen=True, slots=True)
class FailedEpisode:
    """`type`: the class of the exception, or how the episode ended (`Failed`, `Timeout`, ...) where there was none.

    `session` is the id of its session, None if none was started, and `traceback` that of the exception as text.
    """

    type: str
    message: str
    task: str
    session: str | None = None
    traceback: str = ""

    @classmethod
    def by(cls, error: BaseException, task: object, session: str | None = None) -> Self:
        """The failure that an exception stands for."""
        if isinstance(error, AgentFailed):
            return cls(error.kind, error.message, str(task), session, without_keys(error.traceback))
        name = type(error).__name__
        return cls(name, exit_reason(error).removeprefix(f"{name}: "), str(task), session, traceback_of(error))

    @classmethod
    def told_in(cls, meta_info: Mapping[str, Any]) -> Self | None:
        """What `as_dict` gave as `failure` of a rollout's `meta_info`; None if its episode has not failed."""
        told = meta_info.get("failure")
        return None if told is None else cls(**told)

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)

    @property
    def place(self) -> str:
        """Which episode it was."""
        return f"task {self.task}" + ("" if self.session is None else f", session {self.session}")


class TooManyFailedEpisodes(RuntimeError):
    """So many episodes in a row have failed that the run ends. `counts` has their number by type."""

    def __init__(self, message: str, counts: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.counts = counts or {}


class FailureLog:
    """The failed episodes of a run. Any thread may call.

    `most`: after so many in a row `note` raises; None: those of three groups of `group_size`, which may change while
    the run goes on; -1: never. `of` is what the log calls the episodes. `episodes`, `total` and `counts` (by type) are
    those of the whole run. Raises InvalidRequest for another `most`.
    """

    def __init__(self, most: int | None = None, group_size: int = 1, of: str = "an episode") -> None:
        self._given, self.group_size, self._of = checked_most(most), group_size, of
        self.episodes = 0
        self.counts: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._examples: dict[str, FailedEpisode] = {}
        self._lock = threading.Lock()

    def set_most(self, most: int | None, group_size: int) -> None:
        """Let another number end the run, if one is given, and groups have at least so many episodes."""
        given = checked_most(most)
        self._given = self._given if given is None else given
        self.group_size = max(self.group_size, group_size)

    @property
    def most(self) -> int | None:
        """How many failed episodes in a row end the run; None: any number may fail."""
        if self._given is None:
            return GROUPS * self.group_size
        return None if self._given == NO_END else self._given

    @property
    def total(self) -> int:
        return self.counts.total()

    def note(self, failure: FailedEpisode | None) -> None:
        """Note the end of an episode; None: it went well.

        Raises TooManyFailedEpisodes, with the number and an example of each type, if this is one too many in a row.
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
                # Within the lock, so that lines come in the order of counts. No template: filters by template would
                # drop other types.
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
        f"{name} is {most!r}; it must be a positive integer, -1 for no end, or null for {GROUPS} groups' worth",
        param=name,
    )


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception that was raised, without the keys of addresses; else nothing."""
    if error.__traceback__ is None and error.__cause__ is None:
        return ""
    try:
        return without_keys("".join(format_exception(error)))
    except Exception as failure:  # of a class whose text cannot be made
        return f"its traceback cannot be made: {type(failure).__name__}"


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
