"""The process of a run's own server: settings come in on standard input, the address goes out on standard output.

It serves until its standard input ends, which happens however the process that holds the other end ends, or until
SIGTERM. Both stop it gracefully, as `tokengrove serve` stops.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

from proxy import initial_block
from proxy.errors import ConfigurationError
from proxy.settings import Settings
from proxy.telemetry import log
from proxy.types import Credit

URL, ERROR = "url", "error"


def main() -> None:
    """Read the settings, serve, and end the process."""
    from proxy.serving.stop import end_at_signal, end_process

    initial_block.clear()
    end_at_signal()
    settings = _settings(json.loads(sys.stdin.readline()))
    log.set_up(settings.log_format, settings.log_level, workers=settings.workers > 1)
    try:
        _serve(settings)
    except ConfigurationError as error:
        _tell({ERROR: str(error)})
    end_process()


def _serve(settings: Settings) -> None:
    if settings.workers > 1:
        from proxy.serving import supervisor

        supervisor.run(settings, lambda served, url, _: url, _listens)
    else:
        from proxy.serving import server

        log.start_writing()
        server.run(settings, lambda served, url: _listens(url))


def _listens(url: str) -> None:
    _tell({URL: url})
    threading.Thread(target=_watch, name="tokengrove-parent", daemon=True).start()


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(told: dict[str, str]) -> None:
    print(json.dumps(told), flush=True)


def _settings(values: dict[str, Any]) -> Settings:
    values["engine_arg"] = tuple(values["engine_arg"])
    return Settings(**{**values, "credit": Credit(values["credit"])})
