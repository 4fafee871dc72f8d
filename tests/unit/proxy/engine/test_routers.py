"""Routers are refused by name: one that passes control calls to one of its servers looks like a single server."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.engine.servers.kinds import ServerKind, connect
from proxy.engine.servers.pool import Pool
from tests.engines.pools import pool_of, states, wires
from tests.engines.scripts import VOCABULARY
from tests.engines.wire import LiveWire
from tokengrove.errors import ConfigurationError, EngineIncapable, InvalidRequest

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


class Router(LiveWire):
    """Answers like the first of its servers, as vllm-router does, and lists them at `path` as `listed`."""

    def __init__(self, kind: str, path: str, listed: dict[str, Any]) -> None:
        super().__init__(kind)
        self._path, self._listed = path, listed

    async def start(self, *without: str) -> None:
        await super().start(*without)

        async def told(request: Request) -> Response:
            return JSONResponse(self._listed)

        self._app.router.routes.append(Route(self._path, told))


def vllm_router() -> Router:
    return Router("vllm", "/workers", {"workers": [{"url": B, "is_healthy": True}, {"url": A}]})


@pytest.mark.parametrize(
    ("kind", "path", "listed", "named"),
    [
        ("vllm", "/workers", {"workers": [{"url": B, "is_healthy": True}, {"url": A}]}, f"{A},{B}"),
        ("vllm", "/list_workers", {"urls": [A, B]}, f"{A},{B}"),
        ("sglang", "/workers", {"workers": [{"id": "1", "url": A, "runtime_type": "sglang"}]}, A),
        ("vllm", "/workers", {"workers": [{"url": "grpc://10.0.0.1:1"}, {"url": f"{A}@0"}, {}, 1]}, "URL,URL"),
        ("vllm", "/workers", {"workers": []}, "URL,URL"),
    ],
)
@pytest.mark.parametrize("given", [None, ServerKind.VLLM])
async def test_a_router_is_refused_at_once_with_the_names_of_its_servers(
    kind: str, path: str, listed: dict[str, Any], named: str, given: ServerKind | None
) -> None:
    async with wires(0, Router(kind, path, listed)) as (router,):
        with pytest.raises(EngineIncapable, match="is a router, as vllm-router and smg are") as raised:
            await connect(VOCABULARY, given)(router.url)
        assert raised.value.message.startswith(f"{router.url} is a router")
        assert raised.value.message.endswith(f"name the servers themselves: --engine {named}")
        assert router.wire.calls == [] and router.wire.asked == []


async def test_the_server_does_not_start_with_a_router_among_its_engine_servers() -> None:
    async with wires(1, vllm_router()) as (wire, router):
        pool = Pool([wire.url, router.url], connect(VOCABULARY, None), start_timeout_s=600.0, check_s=600.0)
        with pytest.raises(ConfigurationError, match=f"^--engine: {router.url} is a router") as raised:
            await pool.start()
        assert str(raised.value).endswith(f"--engine {A},{B}")
        await pool.close()


async def test_a_router_is_not_added_to_a_running_pool() -> None:
    async with wires(1, vllm_router()) as (wire, router), pool_of(wire.url) as pool:
        with pytest.raises(InvalidRequest, match=f"cannot join the pool: .*--engine {A},{B}$"):
            await pool.add(router.url)
        assert states(pool) == {wire.url: "alive"}


async def test_another_service_at_these_paths_is_no_router() -> None:
    listed = {"workers": 4, "urls": None}
    async with wires(0, Router("vllm", "/workers", listed)) as (server,), pool_of(server.url) as pool:
        assert states(pool) == {server.url: "alive"}
