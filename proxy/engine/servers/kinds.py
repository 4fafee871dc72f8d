"""Which kind of server answers at a URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum

from proxy.engine.servers.connection import NO_KEYS, Keys, ServerConnection
from proxy.engine.servers.remote import RemoteEngine
from proxy.engine.servers.sglang_server import SglangServer
from proxy.engine.servers.vllm_server import VllmServer
from proxy.engine.sglang.wire import VersionNumbers
from proxy.errors import EngineUnavailable, ProxyError


class ServerKind(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"


_SIGNS = {"/model_info": ServerKind.SGLANG, "/get_model_info": ServerKind.SGLANG, "/version": ServerKind.VLLM}
"""Paths that tell the kinds apart, in the order in which they are tried: newer SGLang has no /version."""


def connect(
    vocab_size: int, kind: ServerKind | None, *, processed_logprobs: bool, keys: Keys = NO_KEYS
) -> Callable[[str], Awaitable[RemoteEngine]]:
    """What makes an engine of a URL: it asks the server what it is (unless `kind` says so) and starts the engine.

    It raises EngineLost when nobody answers, EngineUnavailable when it is neither kind.
    """
    numbers = VersionNumbers()

    async def to(url: str) -> RemoteEngine:
        engine: RemoteEngine
        if (kind or await _kind_of(url, keys)) is ServerKind.VLLM:
            engine = VllmServer(url, vocab_size, processed_logprobs=processed_logprobs, keys=keys)
        else:
            engine = SglangServer(url, vocab_size, numbers, keys)
        try:
            await engine.start()
        except ProxyError:
            await engine.close()
            raise
        return engine

    return to


async def _kind_of(url: str, keys: Keys) -> ServerKind:
    connection = ServerConnection(url, keys)
    try:
        for path, kind in _SIGNS.items():
            if await connection.probe(path) is not None:
                return kind
    finally:
        await connection.close()
    raise EngineUnavailable(f"{url} is neither an SGLang nor a vLLM server")
