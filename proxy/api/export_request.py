"""Parse the body of an export. Errors name the field at fault and the allowed values."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from proxy.api.export_options import (
    OPTION_FIELDS,
    check_together,
    parse_choice,
    parse_format,
    parse_options,
)
from proxy.api.known_fields import check_given, check_known, refuse
from proxy.export_formats.encoder import ExportFormat
from proxy.protocols.fields import (
    check_text,
    expect_bool,
    expect_list,
    expect_object,
    expect_str,
    json_type,
    optional_float,
    optional_int,
    optional_object,
    optional_text,
)
from proxy.store.values import Wanted
from proxy.trajectory.layout_options import LayoutOptions
from proxy.types import VALIDATE, Outcome, SessionStatus
from tokengrove.errors import InvalidRequest

SAMPLE_FILTERS = ("purpose", "agent", "min_version", "max_version_span")
"""The filters that select turns or samples; the others select sessions."""
_VALUE_FILTERS = ("metadata", "metrics")
FILTERS = (
    *("group_id", "task_id", "status", "outcome", "since", "validation", "rewarded", *_VALUE_FILTERS),
    *SAMPLE_FILTERS,
)
_RETRY_ORPHANS = "drop_retry_orphans"
"""AReaL's field: whether to leave out answers that a retry replaced. They are left out in any case."""
_OUTLINE = "outline"
"""Whether samples have runs of tokens instead of arrays. Claims have no such field: they are for trainers."""
_FIELDS = ("session_id", "session_ids", "filter", "wait_s", "limit", "cursor", _RETRY_ORPHANS, _OUTLINE, *OPTION_FIELDS)
_RANGE = ("min", "max")
_FAR = sys.float_info.max
_MAX_LIMIT = 1000
_MAX_WAIT_S = 600.0


class Validation(StrEnum):
    """What happens to validation sessions, whose metadata says `validate: true`."""

    SKIP = "skip"
    INCLUDE = "include"
    ONLY = "only"


_VALIDATION = {Validation.SKIP: False, Validation.INCLUDE: None, Validation.ONLY: True}


@dataclass(frozen=True, slots=True)
class ParsedExport:
    """A parsed body: which sessions, with which options, in which format, and which page.

    `wait_s`: seconds to wait for the named sessions to end. `ended_by`: groups contain only sessions that had ended by
    this place in the order of ends, that of a claim; None: all.
    """

    session_ids: tuple[str, ...] | None
    filters: Mapping[str, Any]
    options: LayoutOptions
    format: ExportFormat
    wait_s: float
    limit: int
    cursor: str | None
    ended_by: int | None = None


def parse_export(body: Mapping[str, Any]) -> ParsedExport:
    """The export in a body. Raises InvalidRequest that names the field and the allowed values."""
    check_export_fields(body, _FIELDS)
    if body.get(_RETRY_ORPHANS) is not None:
        expect_bool(body[_RETRY_ORPHANS], _RETRY_ORPHANS)
    session_ids = _parse_session_ids(body)
    filters = optional_object(body, "filter")
    name, options = parse_format(body), parse_options(body, filters)
    if body.get(_OUTLINE) is not None:
        options = replace(options, outline=expect_bool(body[_OUTLINE], _OUTLINE))
    check_together(name, options)
    wait_s = optional_float(body, "wait_s", least=0.0, most=_MAX_WAIT_S) or 0.0
    if wait_s and session_ids is None:
        raise InvalidRequest("'wait_s' needs 'session_id' or 'session_ids', the sessions to wait for", param="wait_s")
    return ParsedExport(
        session_ids=session_ids,
        filters=parse_filters(filters, named=session_ids is not None),
        options=options,
        format=name,
        wait_s=wait_s,
        limit=optional_int(body, "limit", least=1, most=_MAX_LIMIT) or _MAX_LIMIT,
        cursor=optional_text(body, "cursor"),
    )


def check_export_fields(body: Mapping[str, Any], known: Sequence[str], at: str = "") -> None:
    """Raise InvalidRequest for a filter outside of `filter`, or a field that is not in `known`. Nulls are allowed."""
    refuse(body, FILTERS, "is a filter: give it inside 'filter'")
    check_given(body, known, at)


def _parse_session_ids(body: Mapping[str, Any]) -> tuple[str, ...] | None:
    one, many = optional_text(body, "session_id"), body.get("session_ids")
    if many is None:
        return None if one is None else (one,)
    if one is not None:
        raise InvalidRequest("give 'session_id' or 'session_ids', not both", param="session_ids")
    ids = expect_list(many, "session_ids")
    texts = (expect_str(item, f"session_ids[{index}]") for index, item in enumerate(ids))
    return tuple(check_text(text, "session_ids") for text in texts)


def parse_filters(filters: Mapping[str, Any], *, named: bool) -> dict[str, Any]:
    """The fields of a SessionQuery. `named`: validation sessions are not left out, unless the filter says so.

    Raises InvalidRequest that names the field.
    """
    check_known(filters, FILTERS, "filter.")
    texts = {name: optional_text(filters, name, "filter.") for name in ("group_id", "task_id")}
    parsed: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
    if (status := parse_choice(filters, "status", SessionStatus, "filter.")) is not None:
        parsed["status"] = status
    if (outcome := parse_choice(filters, "outcome", Outcome, "filter.")) is not None:
        parsed["outcome"] = outcome
    if (since := filters.get("since")) is not None:
        if isinstance(since, bool) or not isinstance(since, int | float):
            raise InvalidRequest(
                f"'filter.since' must be a number of Unix seconds, not {json_type(since)}", param="filter.since"
            )
        parsed["since"] = float(since)
    if filters.get("rewarded") is not None:
        parsed["rewarded"] = expect_bool(filters["rewarded"], "filter.rewarded")
    for name in _VALUE_FILTERS:
        if values := _parse_values(filters, name):
            parsed[name] = values
    asked = named or VALIDATE in parsed.get("metadata", ())
    if not named:
        parsed["withdrawn"] = False
    validation = parse_choice(filters, "validation", Validation, "filter.")
    if (chosen := _VALIDATION[validation or (Validation.INCLUDE if asked else Validation.SKIP)]) is not None:
        parsed["validation"] = chosen
    return parsed


def _parse_values(filters: Mapping[str, Any], name: str) -> dict[str, Wanted]:
    """The conditions on the values in `metadata` or `metrics`: by key a value, a list of values, or a range."""
    given = filters.get(name)
    values = {} if given is None else expect_object(given, f"filter.{name}")
    return {key: parse_wanted(value, f"filter.{name}.{key}") for key, value in values.items()}


def parse_wanted(value: Any, at: str) -> Wanted:
    if not isinstance(value, dict):
        return Wanted(tuple(value)) if isinstance(value, list) and value else Wanted((value,))
    check_known(value, _RANGE, f"{at}.")
    least, most = (optional_float(value, end, least=-_FAR, most=_FAR, at=f"{at}.") for end in _RANGE)
    if least is None and most is None:
        raise InvalidRequest(f"'{at}' is an object without 'min' and 'max': give a value, a list or a range", param=at)
    return Wanted(least=least, most=most)
