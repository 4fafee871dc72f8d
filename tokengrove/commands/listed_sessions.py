"""Prints a list of sessions or groups, by default newest first, as a table or as one line of JSON for each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tokengrove.commands.export_flags import conditions_of
from tokengrove.commands.shown_session import console_of, print_json
from tokengrove.errors import ConfigurationError
from tokengrove.options.option import options_of
from tokengrove.options.session import StoredFilter

if TYPE_CHECKING:
    from tokengrove.commands.list_source import ListSource
    from tokengrove.terminal.fitting_table import FittingTable

LIMIT = 30
"""The default number of sessions or groups in a list: enough to fill a terminal."""
_WIDE = 160
_MOST_OF_A_PAGE = 1000
_MOST_GROUPS_OF_A_PAGE = 200


@dataclass(frozen=True, slots=True)
class ListFlags:
    """What to list. None or False: no condition. `limit`: the maximum number of entries."""

    group: str | None = None
    task: str | None = None
    status: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    version: int | None = None
    purpose: str | None = None
    forked: bool = False
    search: str | None = None
    text: str | None = None
    metadata: tuple[str, ...] = ()
    trained_in: str | None = None
    order: str | None = None
    limit: int | None = None

    def given(self) -> dict[str, bool]:
        """Whether each flag is given, by name."""
        return {
            f"--{name.replace('_', '-')}": value not in (None, ()) and value is not False
            for name, value in asdict(self).items()
        }

    def filter(self) -> dict[str, Any]:
        """The `filter` of `GET /rl/sessions`. Raises ConfigurationError for metadata that is no condition."""
        reward = {
            name: value for name, value in (("min", self.reward_min), ("max", self.reward_max)) if value is not None
        }
        values = {
            "group_id": self.group,
            "task_id": self.task,
            "status": self.status,
            "reward": reward or None,
            "version": self.version,
            "purpose": self.purpose,
            "forked": self.forked or None,
            "search": self.search,
            "metadata": conditions_of(options_of(StoredFilter)["metadata"], self.metadata) or None,
            "trained_in": self.trained_in,
            "text": self.text,
        }
        return _given(values)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


NOT_OF_GROUPS = {"--reward-min", "--reward-max", "--purpose", "--forked", "--metadata", "--order"}
"""Flags that do not apply to groups."""

FLAGS = {
    "group_id": "--group",
    "task_id": "--task",
    **{name: f"--{name}" for name in ("status", "version", "purpose", "forked", "search", "text", "metadata")},
    "trained_in": "--trained-in",
    **{"reward": "--reward-min and --reward-max", "reward.min": "--reward-min", "reward.max": "--reward-max"},
}
"""The flags, by the filters that they set."""


def in_flags(message: str) -> str:
    """The message of an error, with filters replaced by their flags."""
    for name in sorted(FLAGS, key=len, reverse=True):
        message = message.replace(f"'filter.{name}'", FLAGS[name])
    return message.replace("'order'", "--order")


def print_sessions(source: ListSource, flags: ListFlags, *, as_json: bool) -> None:
    """Print the first sessions, in the order of the flags, that the flags select; without an order, the newest."""
    limit = LIMIT if flags.limit is None else flags.limit
    parts = ["summary", *(() if as_json else ("counts",)), *(() if flags.text is None else ("matches",))]
    query = {**_query(flags), "order": flags.order or "newest", "include": ",".join(parts)}
    listed = _Pages(source.sessions, query, "sessions", limit, _MOST_OF_A_PAGE)
    if as_json:
        for entry in listed.entries():
            print_json(entry)
        return
    from tokengrove.terminal.session_table import matches, session_table

    entries = list(listed.entries())
    _print(session_table(entries, time.time(), listed.first.get("counts"), more=listed.more))
    if flags.text is not None:
        console = console_of()
        for line in matches(entries, listed.first.get("unindexed", 0)):
            console.print(line)


def print_groups(source: ListSource, flags: ListFlags, *, as_json: bool) -> None:
    """Print the newest groups that the flags select."""
    limit = LIMIT if flags.limit is None else flags.limit
    listed = _Pages(source.groups, _query(flags), "groups", limit, _MOST_GROUPS_OF_A_PAGE)
    if as_json:
        for entry in listed.entries():
            print_json(entry)
        return
    from tokengrove.terminal.group_table import group_table

    entries = list(listed.entries())
    _print(group_table(entries, time.time(), more=listed.more))


def _print(table: FittingTable) -> None:
    """Print a table that fits the terminal. A pipe has no width and gets every column."""
    console = console_of()
    width = None if console.is_terminal or "COLUMNS" in os.environ else _WIDE
    console.print(table, soft_wrap=False, width=width)


def _query(flags: ListFlags) -> dict[str, str]:
    """The query of the flags. Raises ConfigurationError for a number that JSON cannot express."""
    chosen = flags.filter()
    try:
        return {"filter": json.dumps(chosen, allow_nan=False)} if chosen else {}
    except ValueError:
        raise ConfigurationError("--reward-min and --reward-max must be finite numbers") from None


class _Pages:
    """At most `limit` entries over all pages, which may be short. `first`: the first page."""

    def __init__(self, read: Any, query: Mapping[str, str], name: str, limit: int, most: int) -> None:
        self._read, self._query, self._name, self._limit, self._most = read, dict(query), name, limit, most
        self.first: Mapping[str, Any] = {}
        self.more = False

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield entries as they are read. Afterwards, `more` is True if there are further entries."""
        left = self._limit
        while True:
            page = self._read({**self._query, "limit": str(min(left, self._most))})
            self.first = self.first or page
            yield from page[self._name]
            left -= len(page[self._name])
            self.more = page["cursor"] is not None
            if not self.more or left <= 0:
                return
            self._query["cursor"] = page["cursor"]
