"""The flags of an export, one for each option with a panel, and the request body for given flags.

The server checks the values. This module refuses only values that a body cannot express. Without flags, the body is
empty.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokengrove.commands.signatures import Command, flag_parameter, with_flags
from tokengrove.errors import ConfigurationError
from tokengrove.options.export import EXPORT_GROUPS, PADDED, SAMPLES, TRAIN, Teacher, TrainSelection, TurnSelection
from tokengrove.options.option import Conditions, Option, options_of
from tokengrove.options.session import SessionFilter

_PLACES = {"": options_of(*EXPORT_GROUPS), "filter": options_of(SessionFilter), "train": options_of(TrainSelection)}
_FLAGS: Mapping[str, tuple[str, Option]] = {
    each.parameter: (place, each)
    for place, group in _PLACES.items()
    for each in group.values()
    if "panel" in each.about
}
"""By parameter: the option's place in the body, and the option."""
_OF_RUNS = (SAMPLES, TRAIN, PADDED)
_WHOLE = {
    *("group_id", "task_id", "status", "outcome", "since", "metadata", "metrics", "rewarded", "validation"),
}
"""Options of a filter that select whole sessions, not turns or samples."""
_OF_SESSIONS = ("discount", "credit")
"""Options of an export that a run sets for its sessions (`--session discount=0.9`), so that all exports agree."""
_ALSO = {"page_size": "--limit"}
"""By parameter: a flag that is the option's own name. A run has none of them: its `--limit` is a number of tasks."""
_CONDITION = re.compile(r"(?P<key>[^<>=]+)(?P<how>>=|<=|=)(?P<value>.*)", re.DOTALL)
_RANGE = {">=": "min", "<=": "max"}


def takes_export_flags(command: Command) -> Command:
    """Add the flags of an export."""
    return with_flags(command, [flag_parameter(each, also=_ALSO.get(name, "")) for name, (_, each) in _FLAGS.items()])


def takes_session_flags(command: Command) -> Command:
    """Add the flags that select whole sessions."""
    return with_flags(command, [flag_parameter(each) for each in _PLACES["filter"].values() if each.name in _WHOLE])


def run_export_flags() -> dict[str, inspect.Parameter]:
    """The export flags of runs, by parameter, without flags that select sessions: a run exports its own sessions."""
    options = {name: option for name, (_, option) in _FLAGS.items() if option.about["panel"] in _OF_RUNS}
    return {name: flag_parameter(option) for name, option in options.items() if option.name not in _OF_SESSIONS}


def export_body(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The request body for flags, by their parameters. None and [] mean not given. Raises ConfigurationError."""
    body: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None or value == [] or value == ():
            continue
        place, option = _FLAGS[name]
        inside = body.setdefault(place, {}) if place else body
        inside[option.name] = _READERS.get(option.kind, _as_it_is)(option, value)
    return body


def _as_it_is(option: Option, value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _bool(option: Option, value: bool | str) -> bool | str:
    """A switch, or the words `true` and `false`; the server refuses other words."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def conditions_of(option: Option, given: Sequence[str]) -> dict[str, Any]:
    """A value, a list of values, or a range, by key. Values are JSON, else text. Raises ConfigurationError."""
    values: dict[str, list[Any]] = {}
    ranges: dict[str, dict[str, Any]] = {}
    for text in given:
        found = _CONDITION.fullmatch(text)
        value = _json(found["value"]) if found else None
        if found is None or (found["how"] in _RANGE and type(value) not in (int, float)):
            raise ConfigurationError(f"{option.flag} {text} is not valid; give KEY=VALUE, KEY>=NUMBER or KEY<=NUMBER")
        key, how = found["key"], found["how"]
        if how in _RANGE:
            ranges.setdefault(key, {})[_RANGE[how]] = value
        else:
            values.setdefault(key, []).append(value)
        if key in values and key in ranges:
            raise ConfigurationError(f"{option.flag} {text} does not go with another value or range of {key}")
    return {**{key: each if len(each) > 1 else each[0] for key, each in values.items()}, **ranges}


def _teachers(option: Option, given: Sequence[str]) -> list[dict[str, Any]]:
    """Teachers by name, each with its model and other fields. Raises ConfigurationError."""
    found = []
    for text in given:
        first, *more = text.split(",")
        name, equals, model = first.partition("=")
        fields = [each.partition("=") for each in more]
        if not (name and equals and model and all(key and value for key, _, value in fields)):
            raise ConfigurationError(f"{option.flag} {text} is not valid; give NAME=MODEL or NAME=MODEL,top_k=8")
        found.append({"name": name, "model": model, **{key: _json(value) for key, _, value in fields}})
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _turns(option: Option, text: str) -> str | list[int]:
    if not text[:1].isdecimal():
        return text  # the server checks words
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"{option.flag} {text} is not valid; give all, last, or indexes like 0,2") from None


_READERS: Mapping[Any, Callable[[Option, Any], Any]] = {
    bool: _bool,
    Conditions: conditions_of,
    tuple[Teacher, ...]: _teachers,
    TurnSelection | frozenset[int]: _turns,
}
