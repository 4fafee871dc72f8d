"""`GET /rl/statistics` and `GET /rl/events`: the activity of the server, once or as a stream, for administrators."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from proxy.api.connections import while_connected
from proxy.api.event_feed import Feed, Kind, Listener
from proxy.api.http import JsonResponse, error_response, key_of
from proxy.api.known_fields import check_known
from proxy.api.long_polls import LongPolls
from proxy.api.statistics import HOUR_S, Statistics
from proxy.protocols.sse import CONTENT_TYPE
from proxy.sessions.access import Access
from tokengrove.errors import InvalidRequest, TooManyRequests, brief

_HEADERS = [
    (b"content-type", CONTENT_TYPE.encode()),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_BEGIN = b"retry: 2000\n\n"


class StatisticsEndpoints:
    """The endpoints for monitoring the server, with the admin key."""

    def __init__(self, access: Access, statistics: Statistics, feed: Feed, polls: LongPolls) -> None:
        self._access, self._statistics, self._feed, self._polls = access, statistics, feed, polls

    async def statistics(self, request: Request) -> JsonResponse:
        """Counts, rates, latencies, backlog, servers, rewards, and the history of the last hour."""
        self._access.check_reader(key_of(request))
        check_known(request.query_params, ("history_s",))
        return JsonResponse(await self._statistics.read(_seconds(request.query_params.get("history_s"))))

    async def events(self, request: Request) -> Events:
        """A stream of events, until the client leaves or the server stops."""
        self._access.check_reader(key_of(request))
        check_known(request.query_params, ("events",))
        return Events(self._feed, _kinds(request.query_params.get("events")), self._polls)


class Events:
    """The answer of /rl/events."""

    def __init__(self, feed: Feed, kinds: frozenset[Kind], polls: LongPolls) -> None:
        self._feed, self._kinds, self._polls = feed, kinds, polls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._feed.listening(self._kinds) as listener, suppress(ClientDisconnect):
                await while_connected(receive, self._write(listener, send))
        except TooManyRequests as error:
            await error_response(scope, error)(scope, receive, send)

    async def _write(self, listener: Listener, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        events: bytes | None = _BEGIN
        while events is not None:
            await send({"type": "http.response.body", "body": events, "more_body": True})
            events = None if self._polls.ending else await self._polls.wait(listener.next())
        await send({"type": "http.response.body", "body": b""})


def _seconds(given: str | None) -> float:
    """The requested length of the history, in seconds."""
    if given is None:
        return HOUR_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= HOUR_S:
        raise InvalidRequest(f"'history_s' must be a number of seconds from 0 to {HOUR_S:g}", param="history_s")
    return seconds


def _kinds(given: str | None) -> frozenset[Kind]:
    """The requested kinds of events, separated by commas; all kinds if none is given."""
    if given is None:
        return frozenset(Kind)
    names = given.split(",")
    for name in names:
        if name not in frozenset(Kind):
            raise InvalidRequest(f"'events' contains {brief(name)}, which is none of {', '.join(Kind)}", param="events")
    return frozenset(map(Kind, names))
