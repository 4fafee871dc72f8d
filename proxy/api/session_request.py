"""Bodies of `/rl/start_session`, `/rl/end_session` and `/rl/rotate_keys` -> values.

Errors name the field at fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.api.known_fields import check_given, check_known
from proxy.api.reward_request import REWARD_FIELDS, finite_reward
from proxy.protocols.fields import (
    expect_bool,
    expect_list,
    expect_str,
    optional_float,
    optional_int,
    optional_object,
    optional_text,
)
from proxy.protocols.sampling_params import parse_sampling
from proxy.rendering.renderer import check_tool_parser
from proxy.rendering.templates.chat_template import check_options
from proxy.sessions.issued_keys import KeyKind
from proxy.sessions.live_session import LIMIT_COUNTS, LIMITS
from proxy.sessions.new_records import TURN_OPTIONS
from proxy.types import Credit, Delivery, Outcome, RewardScope, SamplingParams, SamplingPolicy
from tokengrove.errors import InvalidRequest, brief

_START_FIELDS = (
    *("task_id", "session_id", "group_id", "api_key", "metadata", "sampling", "limits", "discount", "credit"),
    *("group_size", "key_lifetime_s", "grant_capacity", "reward_scope", "delivery", *TURN_OPTIONS),
)
_END_FIELDS = (*REWARD_FIELDS, "score", "outcome", "exit_reason", "metrics", "finished")
_WITHDRAWAL_FIELDS = ("outcome", "exit_reason", "metrics", "finished")
_ROTATE_FIELDS = ("keys", "key_lifetime_s")
_SAMPLING_FIELDS = frozenset(SamplingParams._fields) - {"logit_bias", "ignore_eos", "stop_token_ids"}
# Levels of lists and objects around a stored object in a reply; no reply has more than four.
_LEVELS_AROUND = 8
_MAX_GROUP = 1000  # a claim leases at most so many sessions
_MAX_LIFETIME_S = 3653 * 86_400.0
_MAX_DEADLINE_S = 366 * 86_400.0


def parse_start(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `/rl/start_session` that are not null. Raises InvalidRequest for the first wrong field."""
    check_given(body, _START_FIELDS)
    if body.get("task_id") is None and body.get("session_id") is None:
        raise InvalidRequest(
            "'task_id' is missing: session ids are made from it; give it or 'session_id'", param="task_id"
        )
    for name in ("task_id", "session_id", "group_id", "api_key"):
        optional_text(body, name)
    if optional_int(body, "group_size", least=1, most=_MAX_GROUP) is not None and body.get("group_id") is None:
        raise InvalidRequest("'group_size' needs 'group_id', the group of so many sessions", param="group_id")
    _shallow_object(body, "metadata")
    optional_float(body, "discount", least=0.0, most=1.0)
    _parse_key_lifetime(body)
    if (grant := body.get("grant_capacity")) is not None:
        expect_bool(grant, "grant_capacity")
    if body.get("credit") not in (None, *Credit):
        raise InvalidRequest(f"'credit' must be one of {', '.join(Credit)}", param="credit")
    if body.get("reward_scope") not in (None, *RewardScope):
        raise InvalidRequest(f"'reward_scope' must be one of {', '.join(RewardScope)}", param="reward_scope")
    if body.get("delivery") not in (None, *Delivery):
        raise InvalidRequest(f"'delivery' must be one of {', '.join(Delivery)}", param="delivery")
    _check_turn_options(body)
    given = {name: value for name, value in body.items() if value is not None}
    return {**given, "limits": _parse_limits(body), "sampling": _parse_defaults(body)}


def parse_ending(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that end a session. Raises InvalidRequest that names the field."""
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
    """The fields that end a session which is withdrawn while it is live. Raises InvalidRequest that names the field."""
    check_given(body, _WITHDRAWAL_FIELDS)
    return parse_ending(body)


def parse_rotation(body: Mapping[str, Any]) -> tuple[frozenset[KeyKind], float | None]:
    """The keys to replace, and the lifetime of the new ones. Raises InvalidRequest that names the field."""
    check_given(body, _ROTATE_FIELDS)
    return _parse_key_kinds(body), _parse_key_lifetime(body)


def _parse_key_kinds(body: Mapping[str, Any]) -> frozenset[KeyKind]:
    """The keys named in `keys`, else all."""
    names = [expect_str(name, "keys") for name in expect_list(body.get("keys") or [*KeyKind], "keys")]
    for name in names:
        if name not in list(KeyKind):
            raise InvalidRequest(f"'keys' contains {brief(name)}, which is none of {', '.join(KeyKind)}", param="keys")
    return frozenset(map(KeyKind, names))


def _parse_key_lifetime(body: Mapping[str, Any]) -> float | None:
    """`key_lifetime_s`: seconds until new keys expire, 1 s to ten years; None: use the server's default."""
    return optional_float(body, "key_lifetime_s", least=1.0, most=_MAX_LIFETIME_S)


def _parse_limits(body: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that are not null. Raises InvalidRequest for an unknown limit, or one that no turn could meet."""
    limits = optional_object(body, "limits")
    check_known(limits, sorted(LIMITS), "limits.")
    overflow = limits.get("on_context_overflow")
    if overflow not in (None, "error", "length"):
        raise InvalidRequest("'limits.on_context_overflow' must be error or length", param="limits.on_context_overflow")
    counts = {name: optional_int(limits, name, least=1, at="limits.") for name in sorted(LIMIT_COUNTS)}
    deadline_s = optional_float(limits, "deadline_s", least=0.0, most=_MAX_DEADLINE_S, at="limits.")
    given = {**counts, "deadline_s": deadline_s, "on_context_overflow": overflow}
    return {name: value for name, value in given.items() if value is not None}


def _parse_defaults(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling defaults of a session, under the same rules as the sampling fields of a request."""
    sampling = optional_object(body, "sampling")
    check_known(sampling, sorted(_SAMPLING_FIELDS), "sampling.")
    return parse_sampling(sampling, "sampling.")


def _check_turn_options(body: Mapping[str, Any]) -> None:
    if body.get("sampling_policy") not in (None, *SamplingPolicy):
        raise InvalidRequest(f"'sampling_policy' must be one of {', '.join(SamplingPolicy)}", param="sampling_policy")
    if (name := optional_text(body, "tool_parser")) is not None:
        check_tool_parser(name)
    if (parallel := body.get("parallel_tool_calls")) is not None:
        expect_bool(parallel, "parallel_tool_calls")
    check_options(_shallow_object(body, "chat_template_kwargs"))


def _shallow_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object that replies can repeat. Raises InvalidRequest if it is too deep for the JSON encoder."""
    value: Any = optional_object(body, name)
    wrapped = value
    for _ in range(_LEVELS_AROUND):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except TypeError:
        raise InvalidRequest(f"'{name}' is nested too deeply; it must fit a JSON reply", param=name) from None
    return dict(value)
