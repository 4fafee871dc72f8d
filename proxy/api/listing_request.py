"""The queries of `/rl/sessions` and `/rl/groups` -> values. Errors name the parameter at fault, or the filter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from proxy.api.export_request import SAMPLE_FILTERS, query_fields
from proxy.api.known_fields import check_known, refuse
from proxy.api.option_body import read_group
from proxy.api.session_values import DURATION, KEYED, OF_TURNS, SortOrder
from proxy.protocols.fields import expect_object, optional_int, optional_text
from proxy.store.session_query import SessionQuery, Wanted
from proxy.store.text_query import TextQuery, parse_text
from proxy.trajectory.summary import Summary
from tokengrove.errors import InvalidRequest, brief
from tokengrove.options.option import options_of
from tokengrove.options.session import ListingFilter

_LISTING_FIELDS = ("limit", "cursor", "filter", "order", "partial", "include")
_GROUP_FIELDS = ("limit", "cursor", "filter")
_MAX_PAGE = 1000
_MAX_GROUPS = 200
_MOST_DIGITS = 18  # `int` refuses numbers of more than 4300
_LONGEST_SEARCH = 200
_LONGEST_KEY = 200
STORED = ("session_ids", "version", "duration", "search", "withdrawn")
"""Filters for listings only, on stored values of a session."""
SUMMED = (*OF_TURNS, "purpose", "forked")
"""Filters for listings only, on the summary of a session's turns."""
# Filters of exports that select turns or samples. Listings support only `purpose` of these: one turn must have it.
_OF_SAMPLES = tuple(name for name in SAMPLE_FILTERS if name not in options_of(ListingFilter))


class Order(StrEnum):
    """The order of a listing by creation, oldest or newest first. Other orders are those of a value."""

    OLDEST = "oldest"
    NEWEST = "newest"


class Part(StrEnum):
    """Values of `include`: summaries of each session's turns, the returns of its turns, counts of all sessions, and the
    turns that have the text of the filter.
    """

    SUMMARY = "summary"
    RETURNS = "returns"
    COUNTS = "counts"
    MATCHES = "matches"


SUMMARIES = frozenset((Part.SUMMARY, Part.RETURNS))
"""The parts that are made of a session's turns."""


@dataclass(frozen=True, slots=True)
class SummaryFilter:
    """Conditions on the summary of a session's turns. `purpose`: the purpose of at least one turn; None: any.

    `values`: conditions on values of OF_TURNS, by name.
    """

    values: Mapping[str, Wanted] = field(default_factory=dict)
    purpose: str | None = None
    forked: bool | None = None

    @property
    def asks(self) -> bool:
        """Whether the turns of a session must be read to decide if it is listed."""
        return bool(self.values) or (self.purpose, self.forked) != (None, None)

    def fits(self, summary: Summary) -> bool:
        """Whether a session meets the conditions."""
        return (
            all(wanted.fits(OF_TURNS[name](summary)) for name, wanted in self.values.items())
            and (self.purpose is None or self.purpose in summary.purposes)
            and (self.forked is None or self.forked == (summary.forks > 0))
        )


@dataclass(frozen=True, slots=True)
class ParsedListing:
    """A page of a listing. `query` has the conditions that the database checks, the cursor and the order of creation.

    `sort`: the order of a value; None: that of creation. `partial`: too many sessions are not refused, and only the
    newest ones sorted.
    """

    query: SessionQuery
    summed: SummaryFilter
    limit: int
    include: frozenset[Part]
    sort: SortOrder | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class ParsedGroups:
    """A page of the groups of sessions that `query` selects, by default without withdrawn sessions.

    `before`: the number of the last group on the previous page.
    """

    query: SessionQuery
    limit: int
    before: int | None


def parse_listing(query: Mapping[str, str]) -> ParsedListing:
    """The page that a query of `/rl/sessions` requests. Raises InvalidRequest. `after` is the cursor's older name."""
    given: dict[str, Any] = dict(query)
    if "after" in given and "cursor" not in given:
        given["cursor"] = given.pop("after")
    check_known(given, _LISTING_FIELDS)
    limit = _limit(given, _MAX_PAGE, _MAX_PAGE)
    order = _order(given.get("order", Order.OLDEST))
    sort = None if isinstance(order, Order) else order
    fields, summed = parse_listing_filters(_filter(given.get("filter")))
    wanted = SessionQuery(after=optional_text(given, "cursor"), newest=order is Order.NEWEST, **fields)
    include = _include(given.get("include"))
    if Part.MATCHES in include and wanted.text is None:
        raise InvalidRequest("'include' has matches, which are those of 'filter.text': give it", param="include")
    return ParsedListing(wanted, summed, limit, include, sort, _partial(given.get("partial"), sort))


def parse_groups(query: Mapping[str, str]) -> ParsedGroups:
    """The page that a query of `/rl/groups` requests. Raises InvalidRequest."""
    check_known(query, _GROUP_FIELDS)
    given: dict[str, Any] = dict(query)
    limit = _limit(given, 50, _MAX_GROUPS)
    cursor = given.get("cursor")
    if cursor is not None and not _is_number(cursor):
        raise InvalidRequest(
            "the cursor is that of no page of groups: give the cursor of the last page", param="cursor"
        )
    filters = _filter(given.get("filter"))
    refuse(
        filters,
        (*SUMMED, "metadata", "metrics"),
        "selects no groups: list sessions with it, and with 'group_id'",
        "filter.",
    )
    fields, _ = parse_listing_filters(filters)
    wanted = SessionQuery(**{"withdrawn": False, **fields})
    return ParsedGroups(wanted, limit, None if cursor is None else int(cursor))


def parse_listing_filters(filters: Mapping[str, Any]) -> tuple[dict[str, Any], SummaryFilter]:
    """The fields of a SessionQuery, and the conditions on summaries. Raises InvalidRequest, which names the field."""
    refuse(filters, _OF_SAMPLES, "selects samples, not sessions; export the sessions with it", "filter.")
    chosen = read_group(ListingFilter, filters, "filter.")
    if (search := chosen.search) is not None and not 0 < len(search) <= _LONGEST_SEARCH:
        message = f"'filter.search' must have 1 to {_LONGEST_SEARCH} characters, not {len(search)}"
        raise InvalidRequest(message, param="filter.search")
    if len(chosen.session_ids or ()) > _MAX_PAGE:
        raise InvalidRequest(f"'filter.session_ids' has more than {_MAX_PAGE} ids", param="filter.session_ids")
    text = None if chosen.text is None else _text(chosen.text)
    own = {name: value for name in STORED if (value := getattr(chosen, name)) is not None}
    if chosen.trained_in is not None:
        own["trained_in"] = _trainer_step(chosen.trained_in)
    values = {name: value for name in OF_TURNS if (value := getattr(chosen, name)) is not None}
    summed = SummaryFilter(values, chosen.purpose, chosen.forked)
    return {**query_fields(chosen, named=True), **own, "text": text}, summed


def _order(text: str) -> Order | SortOrder:
    name, dot, key = text.removeprefix("-").partition(".")
    if text in list(Order):
        return Order(text)
    if not dot and (name in OF_TURNS or name == DURATION):
        return SortOrder(name, descending=text.startswith("-"))
    if dot and name in KEYED and 0 < len(key) <= _LONGEST_KEY:
        return SortOrder(name, key, descending=text.startswith("-"))
    words = ", ".join((*Order, *OF_TURNS, DURATION))
    raise InvalidRequest(
        f"'order' must be one of {words}, metadata.KEY or metrics.KEY (with - before a value: descending), "
        f"not {brief(text)}",
        param="order",
    )


def _partial(text: str | None, sort: SortOrder | None) -> bool:
    if text not in (None, "true", "false"):
        raise InvalidRequest(f"'partial' must be true or false, not {brief(text)}", param="partial")
    if text == "true" and sort is None:
        raise InvalidRequest("'partial' applies only to an 'order' by a value", param="partial")
    return text == "true"


def _trainer_step(text: str) -> tuple[str, int]:
    trainer, _, step = text.rpartition("/")
    if not trainer or not _is_number(step):
        raise InvalidRequest(f"'filter.trained_in' must be TRAINER/STEP, not {brief(text)}", param="filter.trained_in")
    return trainer, int(step)


def _text(text: str) -> TextQuery:
    wanted = parse_text(text) if len(text) <= _LONGEST_SEARCH else None
    if wanted is None:
        message = f"'filter.text' must have a word, and at most {_LONGEST_SEARCH} characters"
        raise InvalidRequest(message, param="filter.text")
    return wanted


def _filter(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        return expect_object(orjson.loads(text), "filter")
    except orjson.JSONDecodeError:
        raise InvalidRequest(
            "'filter' must be the JSON of an object, as exports have it, percent-encoded", param="filter"
        ) from None


def _limit(given: dict[str, Any], default: int, most: int) -> int:
    text = given.get("limit", "")
    if _is_number(text):
        given["limit"] = int(text)
    return optional_int(given, "limit", least=1, most=most) or default


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS


def _include(text: str | None) -> frozenset[Part]:
    names: Collection[str] = [] if not text else text.split(",")
    for name in names:
        if name not in list(Part):
            raise InvalidRequest(f"'include' must name parts of {', '.join(Part)}, not {brief(name)}", param="include")
    return frozenset(map(Part, names))
