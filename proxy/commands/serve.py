"""`tokengrove serve`: run the server, and print its address and settings once it listens."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.commands.effective import effective
from proxy.commands.settings_flags import takes_settings
from proxy.progress import warn
from proxy.settings import Settings
from proxy.settings.sources import Sources, read_sources
from proxy.settings.variables import variable_of
from proxy.telemetry import log
from tokengrove import __version__, initial_block
from tokengrove.commands.database_flags import ConfigFile
from tokengrove.errors import ConfigurationError, TunnelUnavailable

if TYPE_CHECKING:
    from starlette.applications import Starlette

logger = logging.getLogger(__name__)

PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config", help="Print the settings, where each comes from, and exit. Keys and passwords are masked."
    ),
]


@takes_settings
def serve(config: ConfigFile = None, print_config: PrintConfig = False, **flags: Any) -> None:
    """Serve a model to agents and record their sessions. Default: a tiny built-in model on 127.0.0.1:8080.

    Each flag is also a variable, TOKENGROVE_ and its name: --max-connections is TOKENGROVE_MAX_CONNECTIONS. In brackets
    is the default.
    """
    if (flags.get("log_format") or os.environ.get(variable_of("log_format"))) == "json":
        log.set_up("json", "info")  # errors in settings are also log lines
    try:
        initial_block.hold()
        sources = read_sources(flags, config=config)
        if print_config:
            print(effective(sources))
            return
        with sources.named():
            _serve(sources)
    except ConfigurationError as error:
        if log.is_json():
            logger.error("start failed", {"error": str(error)})
        log.flush()
        if not log.is_json():
            raise
        sys.exit(1)


def _serve(sources: Sources) -> None:
    from proxy.serving.stop import end_at_signal, end_process

    settings = sources.settings
    log.set_up(settings.log_format, settings.log_level, workers=settings.workers > 1)
    warn(sources.warning)
    warn(settings.weak_key)
    end_at_signal()
    if settings.workers > 1:
        from proxy.serving import supervisor

        supervisor.run(settings, _told, _tell)
    else:
        from proxy.serving import server

        log.start_writing()
        server.run(settings, lambda served, url: _tell(_told(served, url, settings)))
    end_process()


def _told(served: Starlette, url: str, settings: Settings) -> str:
    """The text for when the server listens: the banner, or the fields of its log line in JSON."""
    return json.dumps(_facts(served, url, settings)) if log.is_json() else _banner(served, url, settings)


def _tell(text: str) -> None:
    """Report that the server listens, on the output and to systemd."""
    from proxy.serving.systemd import tell_ready

    log.flush()
    if log.is_json():
        _log_facts(json.loads(text))
    else:
        print(text)
        sys.stdout.flush()
    tell_ready()


def _log_facts(facts: Mapping[str, Any]) -> None:
    logger.setLevel(logging.INFO)  # always logged, like the banner, since the caller waits for the URL
    logger.info(
        "started",
        {
            "url": facts["url"],
            "model": facts["model"],
            "revision": facts["revision"],
            "engine": facts["engine"],
            "weight_version": facts["weight_version"],
            "context_tokens": facts["context_tokens"],
            "database": facts["database"],
            "workers": facts["workers"],
            "access": facts["access"],
            "version": facts["version"],
        },
    )


def _facts(served: Starlette, url: str, settings: Settings) -> dict[str, Any]:
    info = served.state.engine.info()
    return {
        "url": url,
        "model": served.state.model,
        "revision": served.state.revision,
        "engine": info.name,
        "weight_version": info.weight_version,
        "context_tokens": info.context_length,
        "database": served.state.store.label,
        "workers": settings.workers,
        "access": "key" if settings.admin_key else "open",
        "version": __version__,
    }


def _banner(served: Starlette, url: str, settings: Settings) -> str:
    """The model, address, engine, database and access, and a command to try next."""
    info, renderer = served.state.engine.info(), served.state.renderer
    images = renderer.blind and f"refused: {renderer.blind}"
    if renderer.sight is not None:
        takes = "images" in info.capabilities
        images = str(renderer.sight) if takes else f"refused: the engine {info.name} takes none"
    access = "admin key needed" if settings.admin_key else "open: any key or none, from this machine only"
    first, then = _to_try(url, keys=settings.admin_key is not None)
    lines = [
        f"tokengrove serves {served.state.model} at {url}",
        *([f"  revision  {served.state.revision}"] if served.state.revision else []),
        f"  engine    {info.name}, weight version {info.weight_version}, context {info.context_length} tokens",
        *([f"            {info.detail}"] if info.detail else []),
        f"  renderer  {renderer.family}, encoding with {renderer.encoder}",
        *([f"  images    {images}"] if images else []),
        f"  database  {served.state.store.label}",
        *([f"  workers   {settings.workers}"] if settings.workers > 1 else []),
        f"  access    {access}",
        *([f"  agents    {_agents(served, settings)}"] if settings.agent_address else []),
        *([f"  metrics   on port {settings.metrics_port}"] if settings.metrics_port else []),
        *([f"  page      {url}/ui"] if settings.page else []),
        f"  try       {first}",
        f"            {then}",
    ]
    return "\n".join(lines)


def _agents(served: Starlette, settings: Settings) -> str:
    """Where agents on other machines find the server."""
    addresses = served.state.addresses
    if addresses.exposed is not None:
        with suppress(TunnelUnavailable):  # a worker that does not run the tunnel may be ready before it
            return str(addresses.exposed())
    host = settings.agent_address[0] if settings.agent_address else ""
    return f"on {host}, port {addresses.agent_port}"


_JSON = "-H 'content-type: application/json' -d"


def _to_try(url: str, *, keys: bool) -> tuple[str, str]:
    """Two commands to paste. With an admin key, the first starts a session and returns the agent's address."""
    if keys:
        start = (
            f"curl -s {url}/rl/start_session -H 'authorization: Bearer ADMIN_KEY' {_JSON} '{{\"task_id\": \"try\"}}'"
        )
        return start, "then start an agent with the base_url and the api_key of the answer"
    turn = '{"model": "any", "max_tokens": 32, "messages": [{"role": "user", "content": "hello"}]}'
    export = '{"session_id": "try-1"}'
    return (
        f"curl -s {url}/try-1/v1/chat/completions {_JSON} '{turn}'",
        f"curl -s {url}/trajectories/export {_JSON} '{export}'",
    )
