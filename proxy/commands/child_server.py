"""The process of a run's own server (`tokengrove.rollout.own_server`).

It reads its settings from standard input and writes its address to standard output. It serves until SIGTERM, or until
its standard input ends, which happens however the process at the other end ends. Both stop it gracefully, like
`tokengrove serve`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any

from proxy.settings import Settings
from proxy.settings.kinds import convert_named
from proxy.settings.sources import read_sources
from proxy.telemetry import log
from tokengrove import initial_block
from tokengrove.errors import ConfigurationError


def main() -> None:
    """Read the settings, serve, and end the process."""
    from proxy.serving.stop import end_at_signal, end_process

    initial_block.clear()
    end_at_signal()
    asked = json.loads(sys.stdin.readline())
    try:
        settings = settings_of(**asked)
        log.set_up(settings.log_format, settings.log_level, workers=settings.workers > 1)
        _serve(settings)
    except ConfigurationError as error:
        _tell({"error": str(error)})
    end_process()


def settings_of(settings: Mapping[str, Any], defaults: Mapping[str, Any], variables: Mapping[str, str]) -> Settings:
    """The server's settings: `settings` by name, else `variables`, else `defaults`.

    The default model is used only if neither a model nor an engine is given. Raises ConfigurationError naming the
    setting.
    """
    flags = convert_named(settings, "server.")
    origins = read_sources(flags, variables).origins
    named = {"model", "engine"} & origins.keys()
    lacking = {
        name: value for name, value in defaults.items() if name not in origins and not (name == "model" and named)
    }
    return read_sources({**flags, **lacking}, variables).settings


def _serve(settings: Settings) -> None:
    if settings.workers > 1:
        from proxy.serving import supervisor

        supervisor.run(settings, lambda served, url, _: url, lambda url: _listens(url, settings))
    else:
        from proxy.serving import server

        log.start_writing()
        server.run(settings, lambda served, url: _listens(url, settings))


def _listens(url: str, settings: Settings) -> None:
    _tell({"url": url, "admin_key": settings.admin_key, "shutdown_timeout_s": settings.shutdown_timeout_s})
    threading.Thread(target=_watch, name="tokengrove-parent", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(told: Mapping[str, Any]) -> None:
    print(json.dumps(told), flush=True)
