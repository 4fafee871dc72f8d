"""A turn is answered alike, whether it passes Starlette's router and middleware or is called past them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from starlette.routing import Match, Route

from proxy.api.turn_routes import TurnRoutes
from proxy.turns.turns import Turns
from tests.support import Server, says, serving, user

ENDS = (
    *("/chat/completions", "/completions", "/responses", "/messages"),
    *("/models/m:generateContent", "/models/org/m:streamGenerateContent"),
)
METHODS = (":generateContent", ":streamGenerateContent")
PREFIXES = (
    *(
        "",
        "/v1",
        "/s",
        "/s/v1",
        "/v1/v1",
        "/s/v1/v1",
        "/a/b/c",
        "/a/b/v1",
        "/rl/sessions/x",
        "/s~secret/v1",
        "/s~secret",
    ),
    *(
        "/",
        "//v1",
        "//",
        "/s/",
        "/s//v1",
        "/av1",
        "/v1/",
        "/v1/models",
        "/a b",
        "/é~x/v1",
        "/a%2Fb",
        "/a\nb/v1",
        "/messages",
    ),
    *(
        "/chat/completions",
        "/responses/v1",
        "s",
        "v1",
        "x/v1",
        "/v1beta",
        "/s/v1beta",
        "/s/v1alpha",
        "/v1beta/v1",
        "v1beta",
    ),
    *("/s/v1beta/models/x", "/models", "/s/models/x"),
)
TAILS = ("", "/", "\n", "/count_tokens", "x")


def full_match(server: Server, scope: dict[str, Any]) -> tuple[Any, Any] | None:
    """The endpoint and the path parameters of the route that Starlette's router would take."""
    for route in server.app.routes:
        match, child = route.matches(scope)
        if match is Match.FULL:
            return child["endpoint"], child["path_params"]
    return None


async def test_an_address_that_is_recognised_has_the_endpoint_and_session_of_its_route(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        recognised = 0
        for path in (prefix + end + tail for prefix in PREFIXES for end in ENDS for tail in TAILS):
            for method in ("POST", "GET", "HEAD", "PUT", "OPTIONS"):
                scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
                expected = full_match(server, dict(scope))
                found = server.app.turn_routes.find(scope)
                assert found is None or (found, scope["path_params"]) == expected, (method, path)
                recognised += found is not None
        assert recognised == len(ENDS) * sum("\n" not in prefix and prefix[:1] in ("", "/") for prefix in PREFIXES)


async def test_every_route_of_a_turn_is_recognised(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for route in server.app.routes:
            assert isinstance(route, Route)
            path = route.path.replace("{session:path}", "a/b~c").replace("{model:path}", "x")
            scope = {"type": "http", "method": "POST", "path": path, "headers": []}
            assert (server.app.turn_routes.find(scope) is not None) == path.endswith((*ENDS, *METHODS)), path


async def answers(server: Server, method: str, path: str, **request: Any) -> tuple[int, dict[str, str], bytes]:
    """Send a request; return what of its reply does not differ from one request to the next."""
    response = await server.http.request(method, path, **request)
    headers = {name: value for name, value in response.headers.items() if name not in ("request-id", "x-request-id")}
    text = response.text.replace(response.headers.get("request-id", "?"), "ID")
    return response.status_code, headers, text.encode()


BAD = {"model": "m", "messages": [{"role": "nobody"}]}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/s/v1/chat/completions", {}),
    ("HEAD", "/v1/messages", {}),
    ("OPTIONS", "/responses", {}),
    ("DELETE", "/s/messages", {"json": {}}),
    ("POST", "/s/v1/chat/completions/", {"json": {}}),
    ("POST", "/s/v1/chat", {"json": {}}),
    ("POST", "/s/v1/chat/completions", {"json": BAD}),
    ("POST", "/s/v1/chat/completions?x=1", {"json": BAD}),
    ("POST", "/messages", {"json": {}}),
    ("POST", "/v1/responses", {"content": b"{"}),
    ("POST", "/v1/responses", {"content": b""}),
    ("POST", "/s/v1/chat/completions", {"content": b"x" * 2000}),
    ("POST", "/s%20t/v1/chat/completions", {"json": {"model": "m", "messages": [user("hi")]}}),
    ("POST", "//v1/chat/completions", {"json": {"model": "m", "messages": [user("hi")]}}),
    ("POST", "/v1/v1/chat/completions", {"json": {"model": "m", "messages": [user("hi")]}}),
    ("POST", "/a%0Ab/chat/completions", {"json": {"model": "m", "messages": [user("hi")]}}),
    ("POST", "/s/messages", {"json": BAD, "headers": {"x-tokengrove-purpose": "fun"}}),
    ("POST", "/s/v1/chat/completions", {"json": {"model": "m", "messages": [user("hi")], "tools": [{"type": 3}]}}),
]


@pytest.mark.parametrize(("method", "path", "request_"), REQUESTS)
async def test_errors_are_the_same_with_and_without_starlette(
    tmp_path: Path, method: str, path: str, request_: dict[str, Any]
) -> None:
    async with serving(tmp_path, says(), max_body_bytes=1000) as server:
        direct = await answers(server, method, path, **request_)
        server.app.turn_routes = TurnRoutes({})
        assert direct == await answers(server, method, path, **request_)
        assert direct[0] != 200


@pytest.mark.parametrize("direct", [True, False])
async def test_a_crash_answers_500_and_reaches_the_server(tmp_path: Path, direct: bool) -> None:
    async with serving(tmp_path, says()) as server:
        if not direct:
            server.app.turn_routes = TurnRoutes({})
        with patch.object(Turns, "begin", side_effect=ZeroDivisionError):
            status, _, body = await answers(server, "POST", "/s/v1/messages", json=a_message())
            assert status == 500 and b"internal error: the server's log has the traceback" in body
            raising = httpx.ASGITransport(app=server.app)
            async with httpx.AsyncClient(transport=raising, base_url="http://t") as http:
                with pytest.raises(ZeroDivisionError):
                    await http.post("/s/v1/messages", json=a_message())


@pytest.mark.parametrize("direct", [True, False])
async def test_a_client_that_leaves_while_it_sends_its_body_ends_the_request(tmp_path: Path, direct: bool) -> None:
    async with serving(tmp_path, says()) as server:
        if not direct:
            server.app.turn_routes = TurnRoutes({})
        parts = [{"type": "http.request", "body": b'{"model":', "more_body": True}, {"type": "http.disconnect"}]
        sent: list[Any] = []

        async def receive() -> Any:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/s/v1/responses", "query_string": b""}
        scope["headers"] = [(b"content-type", b"application/json")]
        await asyncio.wait_for(server.app(scope, receive, send), 60)
        assert not parts and sent[0]["status"] == 499
        assert server.app.state.registry.find("s") is None


def a_message() -> dict[str, Any]:
    return {"model": "m", "max_tokens": 5, "messages": [user("hi")]}
