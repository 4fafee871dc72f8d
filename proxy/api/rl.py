"""Sessions, rewards and their end over HTTP. What a user set is stored as set; every field at fault is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import orjson
from starlette.requests import Request

from proxy.api.addresses import Addresses
from proxy.api.http import JsonResponse, caller_of, key_of, read_object
from proxy.errors import InvalidRequest
from proxy.protocols.fields import (
    expect_bool,
    expect_list,
    expect_object,
    json_type,
    optional_float,
    optional_int,
    optional_object,
    optional_str,
    optional_text,
)
from proxy.protocols.sampling_params import parse_drawing
from proxy.sessions.access import Access
from proxy.sessions.rewards import (
    Changes,
    Target,
    mark_turn,
    reward_step_scores,
    reward_tokens,
    reward_turn,
    reward_turns,
)
from proxy.sessions.session import LIMIT_COUNTS, LIMITS, KeyKind, Session, StartedSession
from proxy.sessions.sessions import Sessions
from proxy.settings import Settings
from proxy.trajectory.layouts import certificate
from proxy.trajectory.purpose import derive
from proxy.types import Credit, Interaction, Outcome, SamplingParams, Status

_SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__) - {"logit_bias", "stop", "ignore_eos"}
_REWARDS = ("reward", "rewards", "step_scores", "token_rewards")
# Exports are float32, and a sum of rewards must stay finite there.
_MAX_REWARD = 1e30
# How many lists and objects an answer puts around what a caller stored; no answer has more than four.
_LEVELS_AROUND = 8
_MAX_GRANT = 10**9
_MAX_LIFETIME_S = 3653 * 86_400.0
_MAX_DEADLINE_S = 366 * 86_400.0


class Rl:
    """`/rl/...`: start, reward, end and look at sessions."""

    def __init__(self, access: Access, sessions: Sessions, settings: Settings) -> None:
        self._access, self._sessions, self._settings = access, sessions, settings
        self._addresses = Addresses(settings)

    async def start_session(self, request: Request) -> JsonResponse:
        self._access.check_admin(key_of(request))
        started = await self._sessions.start(_parse_start(await self._body(request)))
        return JsonResponse(self._started_json(request, started))

    async def rotate_keys(self, request: Request) -> JsonResponse:
        """New keys for a session, all or those that are named; the old ones are good for nothing from now on."""
        session = await self._access.for_keys(caller_of(request))
        body = await self._body(request)
        wanted = [str(name) for name in expect_list(body.get("keys") or [*KeyKind], "keys")]
        for name in wanted:
            if name not in list(KeyKind):
                raise InvalidRequest(f"'keys' holds {name!r}, and not one of {', '.join(KeyKind)}", param="keys")
        async with session.lock:
            rotated = await self._sessions.rotate_keys(session, frozenset(map(KeyKind, wanted)), _lifetime(body))
        return JsonResponse(self._started_json(request, rotated))

    async def grant_capacity(self, request: Request) -> JsonResponse:
        """Let one more session (or `n`) start. AReaL's clients grant one before each start."""
        self._access.check_admin(key_of(request))
        body = await self._body(request)
        number = optional_int(body, "n", least=1, most=_MAX_GRANT) or 1
        return JsonResponse({"capacity": await self._sessions.grant_capacity(number)})

    async def set_reward(self, request: Request) -> JsonResponse:
        session = await self._access.for_control(caller_of(request))
        body = await self._body(request)
        async with session.lock:
            changes = await self._reward(session, body)
        if not changes:
            raise InvalidRequest("give 'reward', 'rewards', 'step_scores' or 'token_rewards'", param="reward")
        return JsonResponse({"interaction_ids": list(changes)})

    async def mark(self, request: Request) -> JsonResponse:
        """Say whether an interaction, or only some ranges of its output tokens, may be trained."""
        session = await self._access.for_control(caller_of(request))
        marked = _parse_mark(await self._body(request))
        async with session.lock:
            while not await self._sessions.reward(session, changes := mark_turn(session, *marked)):
                pass  # another replica changed the session meanwhile, and it was read anew
        return JsonResponse({"interaction_ids": list(changes)})

    async def end_session(self, request: Request) -> JsonResponse:
        session = await self._access.for_control(caller_of(request))
        body = await self._body(request)
        ending = _parse_ending(body)
        async with session.lock:
            await self._reward(session, body)
            count = await self._sessions.end(session, **ending)
        return JsonResponse({"interaction_count": count})

    async def list_sessions(self, request: Request) -> JsonResponse:
        self._access.check_admin(key_of(request))
        records = await self._sessions.page(request.query_params.get("after"))
        listing = [_record_json(record) for record in records]
        return JsonResponse({"sessions": listing})

    async def show_session(self, request: Request) -> JsonResponse:
        self._access.check_admin(key_of(request))
        session, interactions, begun = await self._sessions.look_at(request.path_params["session"])
        returns, purposes = self._sessions.returns(session), derive(interactions)
        complete = [interaction.id for interaction in interactions if interaction.status is Status.COMPLETE]
        turns = {interaction_id: turn for turn, interaction_id in enumerate(complete)}
        nodes = [
            {**_interaction_json(node, returns.get(node.id), purposes.get(node.id)), "turn": turns.get(node.id)}
            for node in interactions
        ]
        counts = certificate(session.record, interactions, begun)
        shown = {name: counts[name] for name in ("reasons", "unaligned", "failed", "aborted", "superseded")}
        return JsonResponse({**_record_json(session.record), **shown, "begun_not_ended": begun, "interactions": nodes})

    async def _reward(self, session: Session, body: Mapping[str, Any]) -> Changes:
        """Set what the body rewards. Under the session's lock, since named rewards build on what is there; decided
        anew when another replica changed the session meanwhile."""
        while True:
            changes = parse_reward(session, body)
            if not changes or await self._sessions.reward(session, changes):
                return changes

    async def _body(self, request: Request) -> Mapping[str, Any]:
        return await read_object(request, self._settings.max_body_bytes)

    def _started_json(self, request: Request, started: StartedSession) -> dict[str, Any]:
        """`root_url` carries the session's secret: it works with any key or none. Keys that are not new are null."""
        session_id = started.record.session_id
        root_url = f"{self._addresses.root_url(request)}/{quote(session_id, safe='/~:@+')}"
        if started.path_key is not None:
            root_url = f"{root_url}~{started.path_key}"
        return {
            "session_id": session_id,
            "api_key": started.api_key,
            "control_key": started.control_key,
            "base_url": f"{root_url}/v1",
            "root_url": root_url,
            "keys_expire_at": started.record.keys_expire_at,
        }


def parse_reward(session: Session, body: Mapping[str, Any]) -> Changes:
    """The rewards in a body as changes by interaction id. Raises InvalidRequest or NotFound naming the field."""
    kind = _kind_of_reward(body)
    name = optional_str(body, "name")
    target = Target(optional_str(body, "interaction_id"), optional_int(body, "turn", least=0))
    match kind:
        case "rewards":
            rewards = expect_object(body["rewards"], "rewards")
            return reward_turns(session, {key: _finite(value, f"rewards.{key}") for key, value in rewards.items()})
        case "step_scores":
            return reward_step_scores(session, _numbers(body["step_scores"], "step_scores"))
        case "token_rewards":
            return reward_tokens(session, target, _numbers(body["token_rewards"], "token_rewards"))
        case "reward":
            return reward_turn(session, target, _finite(body["reward"], "reward"), name)
    return {}


def _kind_of_reward(body: Mapping[str, Any]) -> str | None:
    """Which of the ways to reward a body takes. Raises InvalidRequest for what would be left aside silently."""
    kinds = [name for name in _REWARDS if body.get(name) is not None]
    if len(kinds) > 1:
        raise InvalidRequest(f"give one of {', '.join(_REWARDS)}, not {' and '.join(kinds)}", param=kinds[1])
    kind = kinds[0] if kinds else None
    one = ("reward", "token_rewards")
    for name, takers in (("interaction_id", one), ("turn", one), ("name", ("reward",))):
        if kind is not None and body.get(name) is not None and kind not in takers:
            raise InvalidRequest(f"'{name}' goes with {' or '.join(takers)}, not with {kind}", param=name)
    if kind is not None and body.get("interaction_id") is not None and body.get("turn") is not None:
        raise InvalidRequest("give 'interaction_id' or 'turn', not both", param="turn")
    return kind


def _shallow_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object that answers can show again: the encoder of JSON goes less deep than the decoder."""
    value: Any = optional_object(body, name)
    wrapped = value
    for _ in range(_LEVELS_AROUND):
        wrapped = [wrapped]
    try:
        orjson.dumps(wrapped)
    except TypeError:
        raise InvalidRequest(f"'{name}' is nested too deeply", param=name) from None
    return dict(value)


def _numbers(value: Any, name: str) -> list[float]:
    return [_finite(item, f"{name}[{index}]") for index, item in enumerate(expect_list(value, name))]


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"'{name}' must be a finite number, not {json_type(value)}", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= _MAX_REWARD:
        raise InvalidRequest(f"'{name}' must be a finite number below {_MAX_REWARD:g}", param=name)
    return number


def _parse_start(body: Mapping[str, Any]) -> dict[str, Any]:
    """What start_session asks for, nulls left out. Raises InvalidRequest for the first field that is wrong."""
    if body.get("task_id") is None and body.get("session_id") is None:
        raise InvalidRequest("'task_id' is missing; session ids are made from it", param="task_id")
    for name in ("task_id", "session_id", "group_id", "api_key"):
        optional_text(body, name)
    _shallow_object(body, "metadata")
    optional_float(body, "discount", least=0.0, most=1.0)
    _lifetime(body)
    if body.get("credit") not in (None, *Credit):
        raise InvalidRequest(f"'credit' must be one of {', '.join(Credit)}", param="credit")
    given = {name: value for name, value in body.items() if value is not None}
    return {**given, "limits": _parse_limits(body), "sampling": _parse_defaults(body)}


def _parse_mark(body: Mapping[str, Any]) -> tuple[str, bool, list[tuple[int, int]] | None]:
    """The interaction, whether it is trainable, and the spans, None where none are given."""
    interaction_id = optional_text(body, "interaction_id")
    if interaction_id is None:
        raise InvalidRequest("'interaction_id' is missing: which turn is marked", param="interaction_id")
    trainable = expect_bool(body.get("trainable"), "trainable")
    if body.get("spans") is None:
        return interaction_id, trainable, None
    spans = [_parse_span(item, f"spans[{at}]") for at, item in enumerate(expect_list(body["spans"], "spans"))]
    if not trainable or not spans:
        message = "'spans' names what is trained: leave it out to train the whole output or (trainable false) nothing"
        raise InvalidRequest(message, param="spans")
    return interaction_id, trainable, spans


def _parse_span(value: Any, name: str) -> tuple[int, int]:
    pair = expect_list(value, name)
    if len(pair) != 2 or not all(type(number) is int for number in pair):
        raise InvalidRequest(f"'{name}' must be [start, end), two integers", param=name)
    return pair[0], pair[1]


def _lifetime(body: Mapping[str, Any]) -> float | None:
    return optional_float(body, "key_lifetime_s", least=1.0, most=_MAX_LIFETIME_S)


def _parse_limits(body: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that are given. Raises InvalidRequest for an unknown one or one that no turn could meet."""
    limits = optional_object(body, "limits")
    _check_known(limits, LIMITS, "limits")
    overflow = limits.get("on_context_overflow")
    if overflow not in (None, "error", "length"):
        raise InvalidRequest("'limits.on_context_overflow' must be error or length", param="limits.on_context_overflow")
    counts = {name: optional_int(limits, name, least=1, at="limits.") for name in sorted(LIMIT_COUNTS)}
    deadline_s = optional_float(limits, "deadline_s", least=0.0, most=_MAX_DEADLINE_S, at="limits.")
    given = {**counts, "deadline_s": deadline_s, "on_context_overflow": overflow}
    return {name: value for name, value in given.items() if value is not None}


def _parse_defaults(body: Mapping[str, Any]) -> dict[str, Any]:
    """The session's sampling, by the same rules as a request's."""
    sampling = optional_object(body, "sampling")
    _check_known(sampling, _SAMPLING_FIELDS, "sampling")
    return parse_drawing(sampling, "sampling.")


def _check_known(values: Mapping[str, Any], known: frozenset[str], name: str) -> None:
    for key in values:
        if key not in known:
            raise InvalidRequest(
                f"'{name}.{key}' is unknown; {name} has {', '.join(sorted(known))}", param=f"{name}.{key}"
            )


def _parse_ending(body: Mapping[str, Any]) -> dict[str, Any]:
    outcome = body.get("outcome")
    if outcome not in (None, *Outcome):
        raise InvalidRequest(f"'outcome' must be one of {', '.join(Outcome)}", param="outcome")
    finished = body.get("finished")
    return {
        "outcome": Outcome(outcome) if outcome is not None else None,
        "exit_reason": optional_text(body, "exit_reason"),
        "metrics": _shallow_object(body, "metrics"),
        "finished": expect_bool(finished, "finished") if finished is not None else None,
    }


def _record_json(record: Any) -> dict[str, Any]:
    return {
        "session_id": record.session_id,
        "status": record.status.value,
        "task_id": record.task_id,
        "group_id": record.group_id,
        "outcome": record.outcome.value if record.outcome else None,
        "exit_reason": record.exit_reason,
        "finished": record.finished,
        "metrics": dict(record.metrics),
        "metadata": dict(record.metadata),
        "discount": record.discount,
        "credit": record.credit.value,
        "weight_version": record.weight_version,
        "created_at": record.created_at,
        "ended_at": record.ended_at,
    }


def _interaction_json(interaction: Interaction, value: float | None, purpose: str | None) -> dict[str, Any]:
    return {
        "id": interaction.id,
        "parent_id": interaction.parent_id,
        "aligned": interaction.aligned,
        "seq": interaction.seq,
        "api": interaction.api.value,
        "reason": interaction.reason.value,
        "status": interaction.status.value,
        "purpose": purpose or interaction.purpose,
        "reward": interaction.reward,
        "rewards": dict(interaction.rewards),
        "return": value,
        "finish_reason": interaction.finish_reason.value if interaction.finish_reason else None,
        "prompt_tokens": interaction.prompt_tokens,
        "output_tokens": len(interaction.output_ids),
        "trainable": interaction.trainable,
        "spans": [list(span) for span in interaction.spans],
        "versions": [list(run) for run in interaction.versions],
        "error": interaction.error,
        "notes": dict(interaction.notes),
    }
