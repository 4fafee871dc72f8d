"""`tokengrove serve`: run the server, and print its address and settings once it listens."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.commands.database_url import ConfigFile
from proxy.commands.effective import effective
from proxy.commands.signatures import takes_settings
from proxy.progress import show_steps, warn
from proxy.settings import Settings
from proxy.settings.sources import read_sources

if TYPE_CHECKING:
    from starlette.applications import Starlette


PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config", help="Print the settings, where each comes from, and exit. Keys and passwords are masked."
    ),
]


@takes_settings
def serve(config: ConfigFile = None, print_config: PrintConfig = False, **flags: Any) -> None:
    """Serve a model to agents and record their sessions. Default: a tiny built-in model on 127.0.0.1:8080."""
    sources = read_sources(flags, config=config)
    if print_config:
        print(effective(sources))
        return
    if sources.settings.log_level in ("debug", "info"):
        show_steps()
    warn(sources.warning)
    warn(sources.settings.weak_key)
    with sources.named():
        _serve(sources.settings)


def _serve(settings: Settings) -> None:
    from proxy.api.audit_log import show_audit_lines
    from proxy.serving.stop import end_at_signal, end_process

    end_at_signal()
    show_audit_lines()
    if settings.workers > 1:
        from proxy.serving import supervisor

        supervisor.run(settings, _banner, _show)
    else:
        from proxy.serving import server

        server.run(settings, lambda served, url: _show(_banner(served, url, settings)))
    end_process()


def _show(text: str) -> None:
    """Print the banner of a server that listens, and tell systemd that it does."""
    from proxy.serving.systemd import tell_ready

    print(text)
    sys.stdout.flush()
    tell_ready()


def _banner(served: Starlette, url: str, settings: Settings) -> str:
    """The model, address, engine, database and access, and a command to try next."""
    info, renderer = served.state.engine.info(), served.state.renderer
    access = "admin key needed" if settings.admin_key else "open: any key or none, from this machine only"
    first, then = _to_try(url, keys=settings.admin_key is not None)
    lines = [
        f"tokengrove serves {served.state.model} at {url}",
        *([f"  revision  {served.state.revision}"] if served.state.revision else []),
        f"  engine    {info.name}, weight version {info.weight_version}, context {info.context_length} tokens",
        *([f"            {info.detail}"] if info.detail else []),
        f"  renderer  {renderer.family}, encoding with {renderer.encoder}",
        f"  database  {served.state.store.label}",
        *([f"  workers   {settings.workers}"] if settings.workers > 1 else []),
        f"  access    {access}",
        f"  try       {first}",
        f"            {then}",
    ]
    return "\n".join(lines)


_JSON = "-H 'content-type: application/json' -d"


def _to_try(url: str, *, keys: bool) -> tuple[str, str]:
    """Two commands to paste. With an admin key the first starts a session, whose answer has the agent's address."""
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
