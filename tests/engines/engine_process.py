"""Processes of real engine servers on a local port, and pools over them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx

from proxy.engine.pauses import Pauses
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from tests.engines.pools import Notes
from tests.support import free_port

START_TIMEOUT_S = 300.0
_VOCABULARY = 640


class EngineProcess:
    """A server process. `command` gets `--port`; `ready`: a path that answers 200 once the server is ready."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, ready: str, port: int | None = None
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready, self._log = ready, log.open("ab")
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}{self._ready}", timeout=2.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"the server on {self.port} did not start; its log is {self._log.name}")

    def kill(self) -> None:
        """Kill the process group, and so the processes that sample too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


@contextlib.asynccontextmanager
async def pool_of(*urls: str, notes: Notes | None = None) -> AsyncIterator[Pool]:
    pool = Pool(urls, connect(_VOCABULARY, None), start_timeout_s=60.0, check_s=0.2)
    pool.pauses = Pauses(notes, "host:8080")
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
