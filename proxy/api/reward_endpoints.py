"""`/rl/set_reward` and `/rl/mark`: rewards and training marks for turns that were already sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from proxy.api.bodies import Bodies
from proxy.api.http import JsonResponse, caller_of
from proxy.api.known_fields import check_given
from proxy.api.repeated_calls import RepeatableCall, RepeatedCalls
from proxy.api.reward_request import ONE_TURN, REWARD_FIELDS, kind_of_reward, parse_mark, parse_reward
from proxy.api.session_json import addressed
from proxy.protocols.fields import optional_str, optional_text
from proxy.sessions.access import Access
from proxy.sessions.endings import ended_otherwise
from proxy.sessions.issued_keys import FEEDBACK_PREFIX
from proxy.sessions.live_session import Changes, LiveSession
from proxy.sessions.rewards import Scores, has_rewards, last_rewarded, mark_turn
from proxy.store.answer import Noted
from proxy.telemetry.http_request import request_of
from tokengrove.errors import InvalidRequest


class RewardEndpoints:
    """Sets rewards and training marks. Values are stored as given; returns are computed from them."""

    def __init__(self, access: Access, scores: Scores, bodies: Bodies, repeated: RepeatedCalls) -> None:
        self._access, self._scores, self._bodies, self._repeated = access, scores, bodies, repeated

    async def set_reward(self, request: Request) -> JsonResponse:
        """Store the rewards in the body. The reply lists the interactions that they belong to.

        AReaL's second API sends the served `model` here. It has no effect, because only one model is served.
        """
        session, body = await self._rewarded(request)
        check_given(body, (*REWARD_FIELDS, "model"))

        async def work(call: RepeatableCall | None) -> JsonResponse:
            async with session.lock:
                changes = await store_rewards(self._scores, session, body, call)
            if not changes:
                raise InvalidRequest("give 'reward', 'rewards', 'step_scores' or 'token_rewards'", param="reward")
            return JsonResponse(_changed(changes), headers=addressed(session.id))

        return await self._repeated.once(request, body, work)

    async def mark(self, request: Request) -> JsonResponse:
        """Mark an interaction, or ranges of its output tokens, as trainable or not."""
        session, body = await self._addressed(request)
        marked = parse_mark(body)

        async def work(call: RepeatableCall | None) -> JsonResponse:
            async with session.lock:
                # Optimistic locking: on a conflict with another replica `set_rewards` re-reads it and returns False.
                changes = mark_turn(session, *marked)
                while not await self._scores.set_rewards(session, changes, _noted(call, session, changes)):
                    changes = mark_turn(session, *marked)
            return JsonResponse(_changed(changes), headers=addressed(session.id))

        return await self._repeated.once(request, body, work)

    async def _rewarded(self, request: Request) -> tuple[LiveSession, Mapping[str, Any]]:
        """Like `_addressed`, but a feedback key is admitted, too."""
        caller = caller_of(request)
        like_one = caller.key is not None and caller.key.startswith(FEEDBACK_PREFIX)
        session = await self._access.of_feedback_key(caller) if like_one else None
        if session is None:
            return await self._addressed(request)
        body = await self._bodies.read_object(request)
        session = await self._access.for_feedback(session, body)
        request_of(request.scope).enter(session.id, session.record.metadata)
        return session, body

    async def _addressed(self, request: Request) -> tuple[LiveSession, Mapping[str, Any]]:
        """The session that a request addresses by its caller and its named turn, and its body."""
        caller = caller_of(request)
        session = await self._access.for_control(caller)
        request_of(request.scope).enter(session.id, session.record.metadata)
        body = await self._bodies.read_object(request)
        return await self._access.for_turn(caller, session, optional_text(body, "interaction_id")), body


def _changed(changes: Changes) -> dict[str, Any]:
    return {"interaction_ids": list(changes)}


def _noted(call: RepeatableCall | None, session: LiveSession, changes: Changes) -> Noted | None:
    return None if call is None else lambda _: call.answer(_changed(changes), session.id)


async def store_rewards(
    scores: Scores, session: LiveSession, body: Mapping[str, Any], call: RepeatableCall | None = None
) -> Changes:
    """Store the rewards in a body, if any, and with them the answer of `call`.

    Call with the lock held: named rewards are merged into the stored ones. Optimistic locking: on a conflict with
    another replica, `set_rewards` re-reads the session and the rewards are computed again.
    """
    while True:
        changes = parse_reward(session, body)
        if not changes or await scores.set_rewards(session, changes, _noted(call, session, changes)):
            return changes


def check_rewards(session: LiveSession, body: Mapping[str, Any]) -> None:
    """Raise EndedOtherwise if a body that ends an ended session again has a reward that is not set.

    A reward that names no turn went to a turn that was complete at the end. Turns that ran then may have followed.
    """
    kind = kind_of_reward(body)
    if kind in ONE_TURN and body.get("interaction_id") is None and body.get("turn") is None:
        whose = (optional_str(body, "name"), optional_text(body, "agent"), optional_text(body, "route"))
        body = {**body, "interaction_id": last_rewarded(session, kind, *whose)}
    if not has_rewards(session, parse_reward(session, body)):
        raise ended_otherwise(session.record, kind or "reward")
