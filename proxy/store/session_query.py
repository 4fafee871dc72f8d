"""The sessions that a reader wants, and the page of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from proxy.store.text_query import TextQuery
from proxy.types import Json
from tokengrove.options.session import Outcome, SessionStatus


@dataclass(frozen=True, slots=True)
class Wanted:
    """The value must equal one of `choices`, if any (null: a missing value), or else be a number in a range.

    JSON's true and 1 are different values, 1 and 1.0 are not. `least` and `most` are inclusive.
    """

    choices: tuple[Json, ...] = ()
    least: float | None = None
    most: float | None = None

    def fits(self, value: Json) -> bool:
        """Whether a value meets the condition."""
        if self.choices:
            return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


MAX_SESSION_IDS = 10_000
"""The most session ids in one statement. Our databases allow at least 32,766 bound values."""


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Conditions that a session must meet, all of them; None: any session.

    `ended_by`: the highest `ended_order`. `since` (Unix seconds): live sessions, and sessions that ended then or later.
    `session_ids` and `group_ids`: at most MAX_SESSION_IDS. `validation`: only validation sessions, or none of them.
    `rewarded`: with or without a reward on a complete turn. `metadata` and `metrics`: the wanted values of top-level
    keys. `version`: the weight version at its start. `duration`: seconds to its end, or to its last change.
    `trained_in`: a trainer and the step in which it trained one of its turns. `withdrawn`: only withdrawn sessions, or
    none of them. `search`: a part of its id, its task's or its group's, case-insensitive. `text`: what one of its turns
    has. Paging: `after` is the last session id of the previous page, `limit` the size of this page; `newest`: in
    reverse order of creation.
    """

    session_ids: Collection[str] | None = None
    group_id: str | None = None
    group_ids: Collection[str] | None = None
    task_id: str | None = None
    status: SessionStatus | None = None
    outcome: Outcome | None = None
    since: float | None = None
    ended_by: int | None = None
    validation: bool | None = None
    rewarded: bool | None = None
    metadata: Mapping[str, Wanted] | None = None
    metrics: Mapping[str, Wanted] | None = None
    version: Wanted | None = None
    duration: Wanted | None = None
    trained_in: tuple[str, int] | None = None
    withdrawn: bool | None = None
    search: str | None = None
    text: TextQuery | None = None
    newest: bool = False
    after: str | None = None
    limit: int | None = None

    @property
    def reads_values(self) -> bool:
        """Whether it needs the values in `metadata` or `metrics`, which the database cannot read."""
        return bool(self.metadata or self.metrics)

    def fits(self, metadata: Mapping[str, Json], metrics: Mapping[str, Json]) -> bool:
        """Whether a session with these values meets the conditions on `metadata` and `metrics`."""
        asked = ((self.metadata or {}, metadata), (self.metrics or {}, metrics))
        return all(wanted.fits(given.get(key)) for keys, given in asked for key, wanted in keys.items())
