"""The body of an export -> what is wanted. Every field at fault is named, with the choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.protocols.base import (
    check_text,
    expect_list,
    expect_str,
    json_type,
    optional_float,
    optional_int,
    optional_object,
    optional_text,
)
from proxy.trajectory.export import ExportOptions, Layout
from proxy.trajectory.paths import Drift
from proxy.trajectory.purpose import Purpose
from proxy.types import Credit, Outcome, SessionStatus

_LAYOUT_NAMES = {
    "individual": Layout.INDIVIDUAL,
    "step": Layout.INDIVIDUAL,
    "concat": Layout.CONCAT,
    "traj": Layout.CONCAT,
}
_FORMATS = ("json",)
_FILTERS = ("group_id", "task_id", "status", "outcome", "since", "purpose", "agent")
_MAX_LIMIT = 1000
_MAX_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A parsed body: which sessions, how, and which page of them."""

    session_ids: tuple[str, ...] | None
    filters: Mapping[str, Any]
    options: ExportOptions
    wait_s: float
    limit: int
    cursor: str | None


def parse_export(body: Mapping[str, Any]) -> ExportRequest:
    """The request in a body. Raises InvalidRequest naming the field and the choices."""
    _check_format(body)
    credit = body.get("credit")
    if credit not in (None, *Credit):
        raise InvalidRequest(f"'credit' must be one of {', '.join(Credit)}", param="credit")
    discount = optional_float(body, "discount", least=0.0, most=1.0)
    session_ids = _parse_session_ids(body)
    filters = optional_object(body, "filter")
    wait_s = optional_float(body, "wait_s", least=0.0, most=_MAX_WAIT_S) or 0.0
    if wait_s and session_ids is None:
        raise InvalidRequest("'wait_s' needs 'session_id' or 'session_ids': whom to wait for", param="wait_s")
    return ExportRequest(
        session_ids=session_ids,
        filters=_parse_filters(filters),
        options=ExportOptions(
            layout=_parse_layout(body),
            discount=discount,
            credit=Credit(credit) if credit else None,
            drift=_parse_drift(body),
            purposes=_parse_names(filters, "purpose", tuple(Purpose)),
            agents=_parse_names(filters, "agent", None),
        ),
        wait_s=wait_s,
        limit=optional_int(body, "limit", least=1, most=_MAX_LIMIT) or _MAX_LIMIT,
        cursor=optional_text(body, "cursor"),
    )


def _check_format(body: Mapping[str, Any]) -> None:
    if body.get("style") is not None and body.get("format") is None:
        raise UnsupportedParameter("'style' asks for format areal, which is not here yet; use 'layout'", param="style")
    if body.get("format") not in (None, *_FORMATS):
        raise InvalidRequest(f"'format' must be one of {', '.join(_FORMATS)}", param="format")
    for name in ("train", "include"):
        if body.get(name) not in (None, {}, []):
            raise UnsupportedParameter(f"'{name}' is not supported yet; leave it out", param=name)


def _parse_layout(body: Mapping[str, Any]) -> Layout:
    name = body.get("layout")
    if name is None:
        return Layout.INDIVIDUAL
    if not isinstance(name, str) or name not in _LAYOUT_NAMES:
        raise InvalidRequest(f"'layout' must be one of {', '.join(_LAYOUT_NAMES)}", param="layout")
    return _LAYOUT_NAMES[name]


def _parse_drift(body: Mapping[str, Any]) -> Drift:
    name = body.get("drift")
    if name is None:
        return Drift.FORK
    if name not in list(Drift):
        raise InvalidRequest(f"'drift' must be one of {', '.join(Drift)}", param="drift")
    return Drift(name)


def _parse_names(filters: Mapping[str, Any], name: str, choices: tuple[str, ...] | None) -> frozenset[str] | None:
    """A filter that is one string or a list of them; None when it is not given."""
    given = filters.get(name)
    if given is None:
        return None
    values = [given] if isinstance(given, str) else expect_list(given, f"filter.{name}")
    for value in values:
        expect_str(value, f"filter.{name}")
        if choices is not None and value not in choices:
            raise InvalidRequest(f"'filter.{name}' must be among {', '.join(choices)}", param=f"filter.{name}")
    return frozenset(values)


def _parse_session_ids(body: Mapping[str, Any]) -> tuple[str, ...] | None:
    one, many = optional_text(body, "session_id"), body.get("session_ids")
    if many is None:
        return None if one is None else (one,)
    if one is not None:
        raise InvalidRequest("give 'session_id' or 'session_ids', not both", param="session_ids")
    ids = expect_list(many, "session_ids")
    texts = (expect_str(item, f"session_ids[{index}]") for index, item in enumerate(ids))
    return tuple(check_text(text, "session_ids") for text in texts)


def _parse_filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    for name in filters:
        if name not in _FILTERS:
            message = f"'filter.{name}' is not supported; filters are {', '.join(_FILTERS)}"
            raise UnsupportedParameter(message, param=f"filter.{name}")
    texts = {name: optional_text(filters, name, "filter.") for name in ("group_id", "task_id")}
    parsed: dict[str, Any] = {name: text for name, text in texts.items() if text is not None}
    for name, choices in (("status", SessionStatus), ("outcome", Outcome)):
        if filters.get(name) is not None:
            if filters[name] not in list(choices):
                raise InvalidRequest(f"'filter.{name}' must be one of {', '.join(choices)}", param=f"filter.{name}")
            parsed[name] = choices(filters[name])
    if (since := filters.get("since")) is not None:
        if isinstance(since, bool) or not isinstance(since, int | float):
            raise InvalidRequest(f"'filter.since' must be Unix seconds, not {json_type(since)}", param="filter.since")
        parsed["since"] = float(since)
    return parsed
