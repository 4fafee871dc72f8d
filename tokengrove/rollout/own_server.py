"""A run's own server: a child process that ends with the run and stores its sessions in the run's folder.

The server is a process, because agents that keep the interpreter busy would slow down a thread, and because a crash of
the run must not lose data that the server has not written yet. It runs in its own process session, so Ctrl-C reaches
only the run, which ends its episodes first. The server stops when its standard input ends: when the run closes it, and
also when the run is killed.
"""

from __future__ import annotations

import json
import logging
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokengrove import initial_block
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import Server
from tokengrove.server_part import check_server

logger = logging.getLogger(__name__)
LOG = "server.log"
_STARTS_AGAIN = 5
_DATABASE = "tokengrove.db"
_ROOT = Path(__file__).resolve().parents[2]
_CODE = f"import sys; sys.path.append({str(_ROOT)!r}); from proxy.commands.child_server import main; main()"
_LONGER_S = 30.0
"""Seconds that a server may take to stop, in addition to its own limit, before it is killed."""


@contextmanager
def own_server(settings: Mapping[str, Any], folder: Path | None, model: str | None = None) -> Iterator[Server]:
    """Run a server in a child process during the block; yield its address and its admin key.

    `settings`: settings of `tokengrove serve` by name. Its environment variables also apply. By default, the port is a
    free port, the database is `tokengrove.db` in `folder`, and the admin key is random. The log is `server.log` in
    `folder`; with `folder` None, both files are in a temporary folder. `model`: the model to serve if the settings name
    neither a model nor an engine.

    Raises ConfigurationError for wrong settings and for a server that cannot start.
    """
    check_server()
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokengrove-run-")))
        folder.mkdir(parents=True, exist_ok=True)
        child = _Child(asked_of(settings, folder, model), folder / LOG)
        stack.callback(child.close)
        listens = child.start()
        yield Server(listens.url, (listens.admin_key or "").split(",")[0] or None)


def asked_of(settings: Mapping[str, Any], folder: Path, model: str | None) -> dict[str, Any]:
    """The input of the server process: its settings, the defaults of other settings, and its variables."""
    variables = initial_block.environment()
    return {
        "settings": {name: value for name, value in settings.items() if value is not None},
        "defaults": {
            **({} if model is None else {"model": model}),
            "port": 0,
            "database_url": f"sqlite:///{folder.resolve() / _DATABASE}",
            "admin_key": secrets.token_urlsafe(24),
        },
        "variables": {name: value for name, value in variables.items() if name.startswith("TOKENGROVE_")},
    }


@dataclass(frozen=True, slots=True)
class _Listens:
    """The message of the server process once it listens."""

    url: str
    admin_key: str | None
    shutdown_timeout_s: float


class _Child:
    """A server process. If it dies before `close`, another process replaces it at the same address, up to five times.

    Sessions are on disk and clients retry for a minute, so the run continues after a restart.
    """

    def __init__(self, asked: Mapping[str, Any], log: Path) -> None:
        self._asked, self._log = asked, log
        self._stops_within_s = _LONGER_S
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._closing = False

    def start(self) -> _Listens:
        """Start the process. Raises ConfigurationError."""
        process = self._process = _started(self._asked, self._log)
        listens = _listening(process, self._log)
        self._stops_within_s = listens.shutdown_timeout_s + _LONGER_S
        same_port = {"port": urlsplit(listens.url).port or 0}
        self._asked = {**self._asked, "settings": {**self._asked["settings"], **same_port}}
        threading.Thread(target=self._watch, args=(process,), name="tokengrove-server-watch", daemon=True).start()
        return listens

    def close(self) -> None:
        with self._lock:
            self._closing = True
        if self._process is not None:
            _end(self._process, self._stops_within_s)

    def _watch(self, process: subprocess.Popen[str]) -> None:
        """Wait until the process ends and replace it, until a replacement does not start or the limit is reached."""
        for _ in range(_STARTS_AGAIN):
            code = process.wait()
            with self._lock:
                if self._closing:
                    return
                logger.warning("the run's own server ended with exit code %d and is restarted; see %s", code, self._log)
                _close_pipes(process)
                process = self._process = _started(self._asked, self._log)
            try:
                _listening(process, self._log)
            except (ConfigurationError, ValueError) as error:  # ValueError: `close` closed its output
                if not self._closing:
                    logger.error("the run's own server cannot be restarted: %s", error)
                return


def _started(asked: Mapping[str, Any], log: Path) -> subprocess.Popen[str]:
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has already ended, and its log has the reason
        # Not in the arguments, which other users can read.
        process.stdin.write(f"{json.dumps(asked, default=_as_json)}\n")
        process.stdin.flush()
    return process


def _listening(process: subprocess.Popen[str], log: Path) -> _Listens:
    """Wait until the server listens. Raises ConfigurationError with the reason if it does not start."""
    assert process.stdout is not None
    for line in process.stdout:
        told = json.loads(line)
        if "error" in told:
            raise ConfigurationError(told["error"])
        return _Listens(**told)
    raise ConfigurationError(f"the run's own server ended with exit code {process.wait()} during its start; see {log}")


def _end(process: subprocess.Popen[str], within_s: float) -> None:
    """Stop the server, which completes running turns and writes all data; kill it if that takes too long."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(within_s)
    except KeyboardInterrupt:
        process.terminate()  # a second request ends running turns at once
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LONGER_S)
        raise
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        _close_pipes(process)


def _close_pipes(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _as_json(value: object) -> object:
    """A setting as JSON: a set or another collection as a list, a path as text."""
    return list(value) if isinstance(value, Iterable) else str(value)
