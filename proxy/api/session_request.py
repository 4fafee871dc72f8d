"""Bodies of `/rl/start_session`, `/rl/end_session` and `/rl/rotate_keys` -> values.

Errors name the field at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.api.known_fields import check_given, check_known
from proxy.api.option_body import read_given
from proxy.api.reward_request import REWARD_FIELDS, finite_reward
from proxy.protocols.fields import (
    expect_bool,
    expect_list,
    expect_str,
    optional_object,
    optional_text,
)
from proxy.protocols.sampling_params import parse_sampling
from proxy.rendering.renderer import check_tool_parser
from proxy.rendering.templates.chat_template import check_options
from proxy.sessions.issued_keys import KeyKind
from proxy.types import SamplingParams
from tokengrove.errors import InvalidRequest, brief
from tokengrove.options.option import options_of
from tokengrove.options.session import Outcome
from tokengrove.options.start import Limits, StartOptions

_START = options_of(StartOptions)
_END_FIELDS = (*REWARD_FIELDS, "score", "outcome", "exit_reason", "metrics", "finished")
_WITHDRAWAL_FIELDS = ("outcome", "exit_reason", "metrics", "finished")
_ROTATE_FIELDS = ("keys", "key_lifetime_s")
_SAMPLING_FIELDS = frozenset(SamplingParams._fields) - {"logit_bias", "ignore_eos", "stop_token_ids"}
# Levels of lists and objects around a stored object in a reply; no reply has more than four.
_LEVELS_AROUND = 8


def parse_start(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `/rl/start_session` that are not null. Raises InvalidRequest for the first wrong field."""
    given = read_given(body, _START)
    if "task_id" not in given and "session_id" not in given:
        raise InvalidRequest(
            "'task_id' is missing: session ids are made from it; give it or 'session_id'", param="task_id"
        )
    if "group_size" in given and "group_id" not in given:
        raise InvalidRequest("'group_size' needs 'group_id', the group of so many sessions", param="group_id")
    _shallow_object(body, "metadata")
    if "tool_parser" in given:
        check_tool_parser(given["tool_parser"])
    check_options(_shallow_object(body, "chat_template_kwargs"))
    limits = vars(given.get("limits", Limits()))
    given["limits"] = {name: value for name, value in limits.items() if value is not None}
    given["sampling"] = _parse_defaults(body)
    if "episodes" in given:
        if "group_size" in given:
            raise InvalidRequest(
                "'group_size' does not go with 'episodes': their number is not known before; leave one out",
                param="group_size",
            )
        cuts = vars(given["episodes"])
        given["episodes"] = {name: value for name, value in cuts.items() if value is not None}
        if "lineage" in given["episodes"]:
            given["episodes"]["lineage"] = sorted(cuts["lineage"])
    return given


def parse_ending(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that end a session. Raises InvalidRequest, which names the field."""
    check_given(body, _END_FIELDS)
    outcome = body.get("outcome")
    if outcome not in (None, *Outcome):
        raise InvalidRequest(f"'outcome' must be one of {', '.join(Outcome)}", param="outcome")
    finished, score = body.get("finished"), body.get("score")
    return {
        "outcome": Outcome(outcome) if outcome is not None else None,
        "exit_reason": optional_text(body, "exit_reason"),
        "metrics": _shallow_object(body, "metrics"),
        "finished": expect_bool(finished, "finished") if finished is not None else None,
        "score": finite_reward(score, "score") if score is not None else None,
    }


def parse_withdrawal(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that end a live session when it is withdrawn. Raises InvalidRequest, which names the field."""
    check_given(body, _WITHDRAWAL_FIELDS)
    return parse_ending(body)


def parse_rotation(body: Mapping[str, Any]) -> tuple[frozenset[KeyKind] | None, float | None]:
    """The keys to replace (None: all), and the lifetime of the new ones. Raises InvalidRequest."""
    check_given(body, _ROTATE_FIELDS)
    lifetime_s = read_given({"key_lifetime_s": body.get("key_lifetime_s")}, _START).get("key_lifetime_s")
    return _parse_key_kinds(body), lifetime_s


def _parse_key_kinds(body: Mapping[str, Any]) -> frozenset[KeyKind] | None:
    """The keys named in `keys`; None without it."""
    if not body.get("keys"):
        return None
    names = [expect_str(name, "keys") for name in expect_list(body["keys"], "keys")]
    for name in names:
        if name not in list(KeyKind):
            raise InvalidRequest(f"'keys' contains {brief(name)}, which is none of {', '.join(KeyKind)}", param="keys")
    return frozenset(map(KeyKind, names))


def _parse_defaults(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults of a session. The rules for sampling fields of a request apply."""
    sampling = optional_object(body, "sampling")
    check_known(sampling, sorted(_SAMPLING_FIELDS), "sampling.")
    return parse_sampling(sampling, "sampling.")


def _shallow_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object that replies can include. Raises InvalidRequest if it is too deep for the JSON encoder."""
    value: Any = optional_object(body, name)
    wrapped = value
    for _ in range(_LEVELS_AROUND):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except TypeError:
        raise InvalidRequest(f"'{name}' is nested too deeply; it must fit a JSON reply", param=name) from None
    return dict(value)
