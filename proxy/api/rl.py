"""Sessions, rewards and their end over HTTP. What a user set is stored as set; every field at fault is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from starlette.requests import Request

from proxy.api.http import JsonResponse, caller_of, key_of, read_object
from proxy.errors import InvalidRequest
from proxy.protocols.base import expect_bool, expect_list, expect_object, expect_str, json_type, optional_float
from proxy.rewards import Changes, reward_step_scores, reward_tokens, reward_turn, reward_turns
from proxy.sessions import LIMITS, Session, Sessions, StartedSession
from proxy.settings import Settings
from proxy.types import Credit, Interaction, Outcome, SamplingParams

_SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__) - {"logit_bias", "stop", "ignore_eos"}


class Rl:
    """`/rl/...`: start, reward, end and look at sessions."""

    def __init__(self, sessions: Sessions, settings: Settings) -> None:
        self._sessions, self._settings = sessions, settings

    async def start_session(self, request: Request) -> JsonResponse:
        self._sessions.check_admin(key_of(request))
        body = await self._body(request)
        _check_start(body)
        started = await self._sessions.start(body)
        return JsonResponse(self._started_json(request, started))

    async def set_reward(self, request: Request) -> JsonResponse:
        session = await self._sessions.for_control(caller_of(request))
        body = await self._body(request)
        changes = parse_reward(session, body)
        if not changes:
            raise InvalidRequest("give 'reward', 'rewards', 'step_scores' or 'token_rewards'", param="reward")
        await self._sessions.reward(session, changes)
        return JsonResponse({"interaction_ids": list(changes)})

    async def end_session(self, request: Request) -> JsonResponse:
        session = await self._sessions.for_control(caller_of(request))
        body = await self._body(request)
        ending = _parse_ending(body)
        changes = parse_reward(session, body)
        if changes:
            await self._sessions.reward(session, changes)
        count = await self._sessions.end(session, **ending)
        return JsonResponse({"interaction_count": count})

    async def list_sessions(self, request: Request) -> JsonResponse:
        self._sessions.check_admin(key_of(request))
        records = await self._sessions.page(request.query_params.get("after"))
        listing = [_record_json(record) for record in records]
        return JsonResponse({"sessions": listing})

    async def show_session(self, request: Request) -> JsonResponse:
        self._sessions.check_admin(key_of(request))
        session, interactions = await self._sessions.look_at(request.path_params["session"])
        returns = self._sessions.returns(session)
        nodes = [_interaction_json(interaction, returns.get(interaction.id)) for interaction in interactions]
        return JsonResponse({**_record_json(session.record), "interactions": nodes})

    async def _body(self, request: Request) -> Mapping[str, Any]:
        return await read_object(request, self._settings.max_body_bytes)

    def _started_json(self, request: Request, started: StartedSession) -> dict[str, Any]:
        """`root_url` carries the session's secret: it works with any key or none."""
        session_id = started.record.session_id
        root = (self._settings.public_url or str(request.base_url)).rstrip("/")
        root_url = f"{root}/{quote(session_id, safe='/~:@+')}~{started.path_key}"
        return {
            "session_id": session_id,
            "api_key": started.api_key,
            "control_key": started.control_key,
            "base_url": f"{root_url}/v1",
            "root_url": root_url,
        }


def parse_reward(session: Session, body: Mapping[str, Any]) -> Changes:
    """The rewards in a body as changes by interaction id. Raises InvalidRequest or NotFound naming the field."""
    if body.get("rewards") is not None:
        rewards = expect_object(body["rewards"], "rewards")
        return reward_turns(session, {key: _finite(value, f"rewards.{key}") for key, value in rewards.items()})
    if body.get("step_scores") is not None:
        return reward_step_scores(session, _numbers(body["step_scores"], "step_scores"))
    interaction_id = body.get("interaction_id")
    if interaction_id is not None:
        expect_str(interaction_id, "interaction_id")
    if body.get("token_rewards") is not None:
        return reward_tokens(session, interaction_id, _numbers(body["token_rewards"], "token_rewards"))
    if body.get("reward") is None:
        return {}
    name = body.get("name")
    if name is not None:
        expect_str(name, "name")
    return reward_turn(session, interaction_id, _finite(body["reward"], "reward"), name)


def _numbers(value: Any, name: str) -> list[float]:
    return [_finite(item, f"{name}[{index}]") for index, item in enumerate(expect_list(value, name))]


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"'{name}' must be a finite number, not {json_type(value)}", param=name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"'{name}' must be a finite number", param=name)
    return number


def _check_start(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for the first field of start_session that is not as it must be."""
    if body.get("task_id") is None and body.get("session_id") is None:
        raise InvalidRequest("'task_id' is missing; session ids are made from it", param="task_id")
    for name in ("task_id", "group_id", "api_key"):
        if body.get(name) is not None:
            expect_str(body[name], name)
    expect_object(body.get("metadata") or {}, "metadata")
    optional_float(body, "discount", least=0.0, most=1.0)
    if body.get("credit") not in (None, *Credit):
        raise InvalidRequest(f"'credit' must be one of {', '.join(Credit)}", param="credit")
    _check_known(expect_object(body.get("limits") or {}, "limits"), LIMITS, "limits")
    _check_known(expect_object(body.get("sampling") or {}, "sampling"), _SAMPLING_FIELDS, "sampling")


def _check_known(values: Mapping[str, Any], known: frozenset[str], name: str) -> None:
    for key, value in values.items():
        if key not in known:
            raise InvalidRequest(
                f"'{name}.{key}' is unknown; {name} has {', '.join(sorted(known))}", param=f"{name}.{key}"
            )
        if key == "on_context_overflow":
            if value not in ("error", "length"):
                raise InvalidRequest(f"'{name}.{key}' must be error or length", param=f"{name}.{key}")
        elif _finite(value, f"{name}.{key}") < 0 and key != "seed":
            raise InvalidRequest(f"'{name}.{key}' must not be negative", param=f"{name}.{key}")


def _parse_ending(body: Mapping[str, Any]) -> dict[str, Any]:
    outcome = body.get("outcome")
    if outcome not in (None, *Outcome):
        raise InvalidRequest(f"'outcome' must be one of {', '.join(Outcome)}", param="outcome")
    exit_reason, finished = body.get("exit_reason"), body.get("finished")
    return {
        "outcome": Outcome(outcome) if outcome is not None else None,
        "exit_reason": expect_str(exit_reason, "exit_reason") if exit_reason is not None else None,
        "metrics": dict(expect_object(body.get("metrics") or {}, "metrics")),
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
        "created_at": record.created_at,
        "ended_at": record.ended_at,
    }


def _interaction_json(interaction: Interaction, value: float | None) -> dict[str, Any]:
    return {
        "id": interaction.id,
        "parent_id": interaction.parent_id,
        "aligned": interaction.aligned,
        "seq": interaction.seq,
        "api": interaction.api.value,
        "reason": interaction.reason.value,
        "status": interaction.status.value,
        "purpose": interaction.purpose,
        "reward": interaction.reward,
        "rewards": dict(interaction.rewards),
        "return": value,
        "finish_reason": interaction.finish_reason.value if interaction.finish_reason else None,
        "prompt_tokens": interaction.prompt_tokens,
        "output_tokens": len(interaction.output_ids),
        "versions": [list(run) for run in interaction.versions],
        "error": interaction.error,
        "notes": dict(interaction.notes),
    }
