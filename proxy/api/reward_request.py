"""Bodies of `/rl/set_reward`, `/rl/end_session` and `/rl/mark` -> changes. Errors name the field at fault."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from proxy.api.known_fields import check_given
from proxy.protocols.fields import (
    expect_bool,
    expect_list,
    expect_object,
    json_type,
    optional_int,
    optional_str,
    optional_text,
)
from proxy.sessions.live_session import Changes, LiveSession
from proxy.sessions.rewards import (
    Align,
    Target,
    reward_step_scores,
    reward_tokens,
    reward_turn,
    reward_turns,
    reward_whole,
)
from tokengrove.errors import InvalidRequest

_REWARDS = ("reward", "rewards", "step_scores", "token_rewards")
REWARD_FIELDS = (*_REWARDS, "interaction_id", "turn", "agent", "route", "name", "align")
"""The fields of a body that rewards turns."""
ONE_TURN = ("reward", "token_rewards")
"""The fields that reward one turn."""
# The fields that qualify a reward, each with the reward fields that it applies to.
_DETAILS = {
    "interaction_id": ONE_TURN,
    "turn": ONE_TURN,
    "agent": (*ONE_TURN, "step_scores"),
    "route": (*ONE_TURN, "step_scores"),
    "name": ("reward",),
    "align": ("step_scores",),
}
_MARK_FIELDS = ("interaction_id", "turn", "route", "trainable", "spans")
# Exports are float32: the sum of many rewards must stay finite there.
_MAX_REWARD = 1e30


def parse_reward(session: LiveSession, body: Mapping[str, Any]) -> Changes:
    """The rewards in a body as changes by interaction id. Raises InvalidRequest or NotFound, which name the field."""
    kind = kind_of_reward(body)
    name = _reward_name(body)
    target = _target(body)
    match kind:
        case "rewards":
            rewards = expect_object(body["rewards"], "rewards")
            given = {key: finite_reward(value, f"rewards.{key}") for key, value in rewards.items()}
            return reward_turns(session, given)
        case "step_scores":
            scores = _numbers(body["step_scores"], "step_scores")
            return reward_step_scores(session, scores, _align(body), target.agent, target.route)
        case "token_rewards":
            return reward_tokens(session, target, _numbers(body["token_rewards"], "token_rewards"))
        case "reward":
            return reward_turn(session, target, finite_reward(body["reward"], "reward"), name)
    return {}


def ending_rewards(session: LiveSession, body: Mapping[str, Any], ending: Mapping[str, Any]) -> Changes:
    """The rewards in a body that ends a session, with its `score` if no turn has a reward."""
    changes = parse_reward(session, body)
    return changes if ending["score"] is None else reward_whole(session, ending["score"], changes)


def kind_of_reward(body: Mapping[str, Any]) -> str | None:
    """The reward field of a body. Raises InvalidRequest for several, and for a field without effect."""
    kinds = [name for name in _REWARDS if body.get(name) is not None]
    if len(kinds) > 1:
        raise InvalidRequest(f"give one of {', '.join(_REWARDS)}, not {' and '.join(kinds)}", param=kinds[1])
    kind = kinds[0] if kinds else None
    for name, takers in _DETAILS.items():
        if body.get(name) is None:
            continue
        if kind is None:
            raise InvalidRequest(f"'{name}' needs a reward beside it: {' or '.join(takers)}", param=takers[0])
        if kind not in takers:
            raise InvalidRequest(f"'{name}' applies only with {' or '.join(takers)}, not with {kind}", param=name)
    return kind


def _target(body: Mapping[str, Any]) -> Target:
    return Target(
        optional_text(body, "interaction_id"),
        optional_int(body, "turn", least=0),
        optional_text(body, "agent"),
        optional_text(body, "route"),
    )


def _reward_name(body: Mapping[str, Any]) -> str | None:
    name = optional_str(body, "name")
    if name == "":
        raise InvalidRequest("'name' is empty: leave it out to set the main reward", param="name")
    return name


def _align(body: Mapping[str, Any]) -> Align:
    value = body.get("align")
    if value is None:
        return Align.STRICT
    if value not in list(Align):
        raise InvalidRequest(f"'align' must be one of {', '.join(Align)}", param="align")
    return Align(value)


def parse_mark(body: Mapping[str, Any]) -> tuple[Target, bool, list[tuple[int, int]] | None]:
    """The turn, whether it is trainable, and the spans (None: the whole output)."""
    check_given(body, _MARK_FIELDS)
    target = _target(body)
    if target == Target(route=target.route):
        raise InvalidRequest("give 'interaction_id' or 'turn', which name the turn to mark", param="interaction_id")
    trainable = expect_bool(body.get("trainable"), "trainable")
    if body.get("spans") is None:
        return target, trainable, None
    spans = [_parse_span(item, f"spans[{at}]") for at, item in enumerate(expect_list(body["spans"], "spans"))]
    if not trainable or not spans:
        message = "'spans' needs 'trainable': true and at least one range; leave it out to mark the whole output"
        raise InvalidRequest(message, param="spans")
    return target, trainable, spans


def _parse_span(value: Any, name: str) -> tuple[int, int]:
    pair = expect_list(value, name)
    if len(pair) != 2 or not all(type(number) is int for number in pair):
        raise InvalidRequest(f"'{name}' must be two integers, [start, end)", param=name)
    return pair[0], pair[1]


def _numbers(value: Any, name: str) -> list[float]:
    return [finite_reward(item, f"{name}[{index}]") for index, item in enumerate(expect_list(value, name))]


def finite_reward(value: Any, name: str) -> float:
    """A reward or score. `name`: its field. Raises InvalidRequest unless exports can represent it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"'{name}' must be a finite number, not {json_type(value)}", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _MAX_REWARD:
        raise InvalidRequest(
            f"'{name}' must be a finite number of at most {_MAX_REWARD:g} in absolute value", param=name
        )
    return number
