"""`tokengrove serve`: run the server in this process, and print its address and settings once it listens."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from proxy.commands.signatures import takes_settings
from proxy.settings import Settings, from_environment

if TYPE_CHECKING:
    from starlette.applications import Starlette


@takes_settings
def serve(**flags: Any) -> None:
    """Serve a model to agents and record their sessions. Default: a tiny built-in model on 127.0.0.1:8080."""
    settings = from_environment(flags)
    from proxy import server

    server.run(settings, lambda served, url: _announce(served, url, settings))


def _announce(served: Starlette, url: str, settings: Settings) -> None:
    """Print the model, address, engine, database and access, and a command to try next."""
    info, renderer = served.state.engine.info(), served.state.renderer
    print(f"tokengrove serves {served.state.model} at {url}")
    print(f"  engine    {info.name}, weight version {info.weight_version}, context {info.context_length} tokens")
    if info.detail:
        print(f"            {info.detail}")
    print(f"  renderer  {renderer.family}, encoding with {renderer.encoder}")
    print(f"  database  {served.state.store.label}")
    access = "admin key needed" if settings.admin_key else "open: any key or none, from this machine only"
    print(f"  access    {access}")
    for title, command in zip(("try", ""), _to_try(url, keys=settings.admin_key is not None), strict=True):
        print(f"  {title:10}{command}")
    sys.stdout.flush()


def _to_try(url: str, *, keys: bool) -> tuple[str, str]:
    """Two commands to paste. With an admin key the first starts a session, whose answer has the agent's address."""
    if keys:
        start = f"curl -s {url}/rl/start_session -H 'authorization: Bearer ADMIN_KEY' -d '{{\"task_id\": \"try\"}}'"
        return start, "then start an agent with the base_url and the api_key of the answer"
    turn = '{"model": "any", "max_tokens": 32, "messages": [{"role": "user", "content": "hello"}]}'
    export = '{"session_id": "try-1"}'
    return f"curl -s {url}/try-1/v1/chat/completions -d '{turn}'", f"curl -s {url}/export_trajectories -d '{export}'"
