"""Connection to an engine server: detect its kind (SGLang or vLLM), and start the engine for it. Refuses routers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

from proxy.engine.expert_layers import ExpertLayers
from proxy.engine.servers.connection import NO_KEYS, Keys, ServerConnection
from proxy.engine.servers.events import ServerEvents
from proxy.engine.servers.remote import RemoteEngine, started
from proxy.engine.servers.same_model import OwnModel
from proxy.engine.servers.sent_images import Eyes
from proxy.engine.servers.sglang_server import SglangServer
from proxy.engine.servers.vllm_server import VllmServer
from proxy.engine.streams import Streams
from proxy.engine.version_names import VersionNumbers
from tokengrove.errors import EngineIncapable, EngineUnavailable


class ServerKind(StrEnum):
    """The kinds of server, by their names in `--engine-arg kind=`."""

    SGLANG = "sglang"
    VLLM = "vllm"


_SIGNS = {"/model_info": ServerKind.SGLANG, "/get_model_info": ServerKind.SGLANG, "/version": ServerKind.VLLM}
"""Paths that identify a kind, in the order of probing. SGLang comes first, since some of its versions have /version."""

_LISTS = {"/workers": "workers", "/list_workers": "urls"}
"""Paths at which routers list the servers behind them, and the field that has the list. Servers have neither path."""


def connect(
    vocab_size: int,
    kind: ServerKind | None,
    *,
    keys: Keys = NO_KEYS,
    interval: int | None = None,
    eyes: Eyes | None = None,
    own: OwnModel | None = None,
    layers: ExpertLayers | None = None,
) -> Callable[[str], Awaitable[RemoteEngine]]:
    """Return a function that connects to a URL and starts the engine there.

    `vocab_size`: the vocabulary size of the model, which servers do not report. `kind` None: detect the kind.
    `interval`: the setting `--stream-interval`. `eyes`: the images of a vision model; None for other models.
    `own`: the model that servers must serve; None: any. `layers`: its expert layers; None if they are not known.

    The function raises EngineLost if the server does not answer, EngineUnavailable if it is of neither kind,
    OtherModel if it serves another model, and EngineIncapable if it is a router.
    """
    numbers, streams, events = VersionNumbers(), Streams(interval), ServerEvents()
    blind: dict[str, str] = {}
    missing: dict[str, list[str]] = {}

    async def to(url: str) -> RemoteEngine:
        engine: RemoteEngine
        if await _kind_of(url, keys, kind) is ServerKind.VLLM:
            engine = VllmServer(url, vocab_size, numbers, keys, streams, eyes, own)
        else:
            engine = SglangServer(url, vocab_size, numbers, keys, streams, eyes, own, layers)
        try:
            await started(engine)
        except BaseException:
            await engine.close()
            raise
        if missing.get(url) != engine.missing:
            missing[url] = engine.missing
            for what in engine.missing:
                events.warning("engine server lacks a flag", url, reason=what)
        if engine.blind and blind.get(url) != engine.blind:
            blind[url] = engine.blind
            events.warning("engine server takes no images", url, reason=engine.blind)
        return engine

    return to


async def _kind_of(url: str, keys: Keys, kind: ServerKind | None) -> ServerKind:
    connection = ServerConnection(url, keys)
    try:
        await _refuse_router(connection)
        if kind is not None:
            return kind
        for path, found in _SIGNS.items():
            if await connection.probe(path) is not None:
                return found
    finally:
        await connection.close()
    paths = ", ".join(_SIGNS)
    raise EngineUnavailable(f"{url} is neither an SGLang nor a vLLM server: it has no JSON object at any of {paths}")


async def _refuse_router(connection: ServerConnection) -> None:
    """Raise EngineIncapable for a router, which may look like one server that can be paused and updated.

    Of two servers behind it, one would then sample with old weights, or stay paused.
    """
    for path, field in _LISTS.items():
        listed = (await connection.probe(path) or {}).get(field)
        if isinstance(listed, list):
            urls = ",".join(sorted(filter(None, map(_http_url, listed))))
            named = f"--engine {urls}" if urls else "--engine URL,URL"
            raise EngineIncapable(
                f"{connection.url} is a router, as vllm-router and smg are: it passes pauses and weights to one of its "
                f"servers or to none; name the servers themselves: {named}"
            )


def _http_url(listed: Any) -> str | None:
    """The URL of a server in a router's list; None if it speaks another protocol, or is one rank of a server."""
    url = listed.get("url") if isinstance(listed, dict) else listed
    return url if isinstance(url, str) and url.startswith("http") and "@" not in url else None
