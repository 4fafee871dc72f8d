"""The endpoint of a turn that another worker must answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson

from proxy.api.bodies import Bodies, Upload
from proxy.api.forwarding import Forwarding
from proxy.api.turn_endpoints import TurnEndpoint
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.resources.memory import FreedMemory
from proxy.resources.turnstile import Turnstile
from proxy.sessions.access import Access
from proxy.settings import Settings
from proxy.turns.turns import Turns
from proxy.workers.attempt_table import RunsElsewhere
from tests.support import user


async def test_a_request_is_passed_on_as_it_was_sent_even_if_it_cannot_be_encoded_again() -> None:
    depth = 300  # orjson encodes at most 254 levels
    body = orjson.dumps({"model": "m", "messages": [user("hi")]})[:-1] + b',"user_data":' + b"[" * depth + b"]" * depth
    body += b', "seed": 1.0}'
    passed_on: list[tuple[int, bytes]] = []

    class Reply:
        started = True

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...

    async def resolve(caller: Any) -> Any:
        return SimpleNamespace(id="s", parsed={}, record=SimpleNamespace(metadata={}))

    async def begin(session: Any, asked: Any, **more: Any) -> None:
        raise RunsElsewhere(1)

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    def to(worker: int, sent: bytes, upload: Upload) -> Reply:
        passed_on.append((worker, sent))
        return Reply()

    main = SimpleNamespace(model="m", gate=SimpleNamespace(closed=False))
    routes = SimpleNamespace(names=SimpleNamespace(declared=False), main=main)
    endpoint = TurnEndpoint(
        ChatProtocol(),
        cast("Access", SimpleNamespace(open_server=True, shared=False, resolve=resolve)),
        cast("Turns", SimpleNamespace(blocked=False, absence=SimpleNamespace(since=None), begin=begin, routes=routes)),
        Turnstile(),
        Bodies(Settings(), FreedMemory()),
        cast("Forwarding", SimpleNamespace(to=to)),
    )
    scope = {"type": "http", "method": "POST", "path": "/s/v1/chat/completions", "path_params": {}}
    scope["headers"] = [(b"content-type", b"application/json")]
    await endpoint(scope, receive, send)
    assert passed_on == [(1, body)]
