"""`/rl/...` endpoints that start, end, show and delete sessions, and grant capacity to start more."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from proxy.api.addresses import Addresses
from proxy.api.annotation_json import read_turn
from proxy.api.audit_log import note
from proxy.api.bodies import Bodies
from proxy.api.chosen_routes import check_of_session
from proxy.api.export_request import TOKEN_OPTIONS, parse_token_options
from proxy.api.http import JsonResponse, caller_of, key_of
from proxy.api.known_fields import check_given, check_known, refuse
from proxy.api.pace import Pace
from proxy.api.repeated_calls import RepeatableCall, RepeatedCalls
from proxy.api.reward_endpoints import check_rewards, store_rewards
from proxy.api.reward_request import ending_rewards
from proxy.api.session_json import addressed, running_json, session_json, started_json
from proxy.api.session_request import parse_ending, parse_start, parse_withdrawal
from proxy.api.turn_columns import PAGE_OPTIONS, Vocabulary, parse_page, read_columns, read_replay
from proxy.api.turn_json import OF_A_SESSION, Part, digests_of, find_turn, parse_include, tree_json, turn_json
from proxy.api.turn_reply import Replies
from proxy.api.turn_request import Requests
from proxy.api.turn_tokens import encoded_tokens
from proxy.protocols.fields import optional_int
from proxy.sessions.access import Access
from proxy.sessions.endings import Deletion, Endings, Withdrawal
from proxy.sessions.ids import check_dots
from proxy.sessions.live_session import Changes, LiveSession
from proxy.sessions.registry import Registry
from proxy.sessions.rewards import Scores
from proxy.sessions.session_starter import SessionStarter
from proxy.store.archive.served import ServedArchive
from proxy.store.recordings import Recordings
from proxy.store.session_starts import SessionStarts
from proxy.store.stored_images import StoredImages
from proxy.telemetry.http_request import request_of
from proxy.turns.route import Routes
from proxy.turns.running import RunningTurns
from proxy.types import Interaction
from tokengrove.errors import InvalidRequest, SessionArchived
from tokengrove.options.session import SessionStatus

_MAX_GRANT = 10**9


class SessionEndpoints:
    """Starts, ends, shows and deletes sessions. The admin key may do everything, a control key end its own session."""

    def __init__(
        self,
        *,
        access: Access,
        registry: Registry,
        starter: SessionStarter,
        scores: Scores,
        endings: Endings,
        deletion: Deletion,
        withdrawal: Withdrawal,
        running: RunningTurns,
        starts: SessionStarts,
        recordings: Recordings,
        archive: ServedArchive,
        bodies: Bodies,
        addresses: Addresses,
        replies: Replies,
        requests: Requests,
        routes: Routes,
        pace: Pace,
        images: StoredImages,
        repeated: RepeatedCalls,
    ) -> None:
        self._images, self._repeated, self._archive = images, repeated, archive
        self._access, self._registry, self._starter = access, registry, starter
        self._scores, self._endings = scores, endings
        self._deletion, self._withdrawal, self._running_turns = deletion, withdrawal, running
        self._starts, self._recordings = starts, recordings
        self._bodies, self._addresses, self._replies = bodies, addresses, replies
        self._routes, self._requests = routes, requests
        self._pace, self._one_at_a_time = pace, asyncio.Lock()

    async def grant_capacity(self, request: Request) -> JsonResponse:
        """Let `n` more sessions start (default: 1), or fewer if negative. AReaL's clients call it before each start."""
        self._access.check_admin(key_of(request))
        body = await self._body(request)
        check_given(body, ("n",))
        number = optional_int(body, "n", least=-_MAX_GRANT, most=_MAX_GRANT)
        if number == 0:
            raise InvalidRequest(
                "'n' must not be 0: a number above grants starts, one below takes some back", param="n"
            )

        async def work(call: RepeatableCall | None) -> JsonResponse:
            noted = None if call is None else lambda left: call.answer({"capacity": left})
            left = await self._starts.grant_capacity(1 if number is None else number, noted)
            return JsonResponse({"capacity": left})

        return await self._repeated.once(request, body, work)

    async def start(self, request: Request) -> JsonResponse:
        """Start a session; the reply has its addresses and new keys. An existing `session_id` is refused."""
        self._access.check_admin(key_of(request))
        body = await self._body(request)
        wanted, record = parse_start(body), request_of(request.scope)
        record.metadata = wanted.get("metadata")  # the log line of a refused start also names its run
        url = self._addresses.root_url(request)

        async def work(call: RepeatableCall | None) -> JsonResponse:
            noted = None if call is None else lambda issued: call.answer(started_json(issued, url))
            started = await self._starter.start(wanted, noted)
            record.enter(started.record.session_id, started.record.metadata)
            return JsonResponse(started_json(started, url))

        return await self._repeated.once(request, body, work)

    async def end(self, request: Request) -> JsonResponse:
        """Store the rewards in the body, if any, and end the session. Repeating an equal end changes nothing.

        An expired session accepts rewards but no other fields: the server has ended it, not the environment.
        """
        session = await self._access.for_control(caller_of(request))
        request_of(request.scope).enter(session.id, session.record.metadata)
        body = await self._body(request)
        ending = parse_ending(body)

        async def work(call: RepeatableCall | None) -> JsonResponse:
            told = {"interaction_count": 0}

            def rewards() -> Changes:
                told["interaction_count"] = len(session.complete())
                return ending_rewards(session, body, ending)

            noted = None if call is None else lambda _: call.answer(told, session.id)
            async with session.lock:
                if not await self._endings.end(session, **ending, rewards=rewards, noted=noted):
                    told["interaction_count"] = len(session.complete())
                    if session.record.status is SessionStatus.EXPIRED:
                        await store_rewards(self._scores, session, body)
                    else:
                        check_rewards(session, body)
            return JsonResponse(told, headers=addressed(session.id))

        return await self._repeated.once(request, body, work)

    async def withdraw(self, request: Request) -> JsonResponse:
        """Withdraw a session from training. A live session ends, and its running turns are cancelled.

        For a session that has already ended or was withdrawn, the fields of the body have no effect.
        """
        session = await self._access.for_control(caller_of(request))
        request_of(request.scope).enter(session.id, session.record.metadata)
        body = await self._body(request)
        ending = parse_withdrawal(body)

        async def work(call: RepeatableCall | None) -> JsonResponse:
            told = {"interaction_count": 0}

            def counted() -> dict[str, int]:
                told["interaction_count"] = len(session.complete())
                return told

            async with session.lock:
                noted = None if call is None else lambda _: call.answer(counted(), session.id)
                await self._withdrawal.withdraw(session, ending, noted)
            self._running_turns.cancel_in(session)
            return JsonResponse(counted(), headers=addressed(session.id))

        return await self._repeated.once(request, body, work)

    async def show(self, request: Request) -> JsonResponse:
        """One session with its tree of interactions. `turn` numbers complete ones, from 0. `include` adds parts."""
        self._access.check_reader(key_of(request))
        check_known(request.query_params, ("include",))
        include = parse_include(request.query_params.get("include"), OF_A_SESSION)
        session = await self._registry.get(check_dots(request.path_params["session"]))
        begun = await self._registry.count_begun(session.id)
        running = await self._running(session) if Part.RUNNING in include else None
        interactions = await self._recordings.load_interactions(session.id)
        if not include:
            return JsonResponse(session_json(session.record, interactions, begun))
        pixels = await self._pixels(interactions, include)
        of_session = (session.record, interactions, begun, include, self._routes.decoder, pixels)
        shown = await asyncio.to_thread(tree_json, *of_session)
        if Part.REPLY in include:
            replies = await asyncio.to_thread(self._replies.replies, interactions)
            for entry, reply in zip(shown["interactions"], replies, strict=True):
                entry["reply"] = reply
        return JsonResponse(shown if running is None else {**shown, "running": running})

    async def show_turn(self, request: Request) -> JsonResponse:
        """One turn, by id or number. `include` adds parts. The other parameters are export options for `tokens`, and
        the page of `columns`."""
        self._access.check_reader(key_of(request))
        check_known(request.query_params, ("include", *TOKEN_OPTIONS, *PAGE_OPTIONS))
        include = parse_include(request.query_params.get("include"))
        options = parse_token_options(request.query_params)
        page = parse_page(request.query_params, options.drift)
        _refuse_unused(request.query_params, include)
        session = await self._registry.get(check_dots(request.path_params["session"]))
        interactions = await self._recordings.load_interactions(session.id)
        turn = find_turn(interactions, request.path_params["interaction"])
        check_of_session(options, interactions)
        pixels = await self._pixels(interactions, include)
        decode = self._routes.decoder(turn.route)
        # Comparing reads all messages of the session.
        shown = await asyncio.to_thread(turn_json, session.record, interactions, turn, include, decode, pixels)
        if Part.REPLY in include:
            shown["reply"] = await asyncio.to_thread(self._replies.reply, interactions, turn)
        if Part.REQUEST in include:
            shown["request"] = await self._requests.request(session.record, interactions, turn)
        if Part.TOKENS in include:
            route = self._routes.reader(turn.route)
            if route is not None:
                options = replace(options, placeholders=route.renderer.placeholders)
            of_turn = (session.record, interactions, turn, options, None if route is None else route.texts)
            async with self._one_at_a_time:  # a layout needs the memory of the session's samples
                shown["tokens"] = await self._pace.work(asyncio.to_thread(encoded_tokens, *of_turn))
        if Part.REPLAY in include:
            shown["replay"] = await read_replay(self._recordings, turn)
        if Part.COLUMNS in include:
            route = self._routes.reader(turn.route) or self._routes.main  # only turns of engines have columns
            told = Vocabulary(route.texts, route.gate.info().vocab_size)
            shown["columns"] = await read_columns(self._recordings, interactions, turn, page, told)
        if Part.ANNOTATIONS in include:
            shown["annotations"] = await read_turn(self._recordings, turn)
        return JsonResponse(shown)

    async def delete(self, request: Request) -> JsonResponse:
        """Permanently delete a session. If it is live, its running turns are cancelled."""
        note(request, session=request.path_params["session"])
        self._access.check_admin(key_of(request))
        check_given(body := await self._body(request), ())

        async def work(call: RepeatableCall | None) -> JsonResponse:
            try:
                session = await self._registry.get(check_dots(request.path_params["session"]))
            except SessionArchived as error:
                return await self._delete_archived(error.session_id)
            request_of(request.scope).enter(session.id, session.record.metadata)
            noted = None if call is None else lambda count: call.answer({"interaction_count": count}, session.id)
            count = await self._deletion.delete(session, noted)
            self._running_turns.cancel_in(session)
            return JsonResponse({"interaction_count": count}, headers=addressed(session.id))

        return await self._repeated.once(request, body, work)

    async def _delete_archived(self, session_id: str) -> JsonResponse:
        """Delete an archived session. A repeated call finds none, and is answered with 404."""
        found = (await self._recordings.find_archived([session_id])).get(session_id)
        await self._archive.delete(session_id)
        return JsonResponse({"interaction_count": 0 if found is None else found.turns}, headers=addressed(session_id))

    async def _pixels(self, interactions: Sequence[Interaction], include: Collection[Part]) -> Mapping[str, str]:
        """The pixel digests of a session's images, to find equal pictures; empty without images or a comparison."""
        digests = digests_of(interactions) if Part.COMPARED in include else ()
        return await self._images.pixels(digests) if digests else {}

    async def _running(self, session: LiveSession) -> list[dict[str, Any]]:
        """The calls that have begun and not ended. Read them before the interactions to miss no call."""
        return running_json(await self._registry.load_begun(session.id), self._running_turns.of(session))

    async def _body(self, request: Request) -> Mapping[str, Any]:
        return await self._bodies.read_object(request)


def _refuse_unused(query: Mapping[str, str], include: Collection[Part]) -> None:
    """Raise InvalidRequest for a parameter that no part of the reply uses."""
    if Part.TOKENS not in include:
        unused = [name for name in TOKEN_OPTIONS if name != "drift" or Part.COLUMNS not in include]
        refuse(query, unused, "applies only with include=tokens")
    if Part.COLUMNS not in include:
        refuse(query, PAGE_OPTIONS, "applies only with include=columns")
