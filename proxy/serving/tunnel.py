"""The tunnel of `--expose`: a program that makes the listener for agents reachable from elsewhere, and prints its URL.

A URL counts once a request to it has reached this server, because tunnels also print links to their documentation. The
program is started again when it ends, later after each failure, and new sessions get its newest URL. It ends with this
process, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from proxy.api.agent_listener import PROBE, proof_of
from tokengrove.errors import ConfigurationError, TunnelUnavailable

logger = logging.getLogger(__name__)

_CLOUDFLARED = "cloudflared tunnel --no-autoupdate --url http://{host}:{port}"
_URL = re.compile(r"https?://[A-Za-z0-9.-]+(?::[0-9]+)?(?:/[\w.~/-]*)?")
_MOST_URLS = 32
_SHOWN_LINES = 5
_LINE_BYTES = 64 * 1024
_PROBE_EVERY_S, _PROBE_S = 0.25, 10.0
_AGAIN_S, _LONGEST_AGAIN_S = 1.0, 30.0
_END_S = 5.0
_HIDDEN = "TOKENGROVE_"

# Runs the program of its arguments, which the system kills when this process (the first argument) ends.
_BOUND = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


EXPOSED_FILE = "exposed-url"
"""The file with the URL in the folder of the workers. The supervisor removes it when the leading worker has died."""


class ExposedUrl:
    """The URL of the tunnel. With workers, it is in `file`, where the leading worker writes it and all read it."""

    def __init__(self, file: Path | None = None) -> None:
        self._file, self._url = file, ""

    def set(self, url: str) -> None:
        """Set the URL; empty while there is none."""
        self._url = url
        if self._file is not None:
            new = self._file.with_suffix(".new")
            with contextlib.suppress(FileNotFoundError):  # the supervisor has ended, and removed the folder
                new.write_text(url)
                new.replace(self._file)

    def get(self) -> str:
        """The URL. Raises TunnelUnavailable while there is none."""
        if self._file is not None:
            try:
                self._url = self._file.read_text()
            except FileNotFoundError:
                self._url = ""
        if not self._url:
            raise TunnelUnavailable("the tunnel (--expose) is starting again; try again", retry_after_s=1.0)
        return self._url


class Tunnel:
    """Runs the program of `--expose` for the listener at `host` and `port`. `url`: where it notes the URL."""

    def __init__(self, command: str, host: str, port: int, timeout_s: float, url: ExposedUrl) -> None:
        known = _CLOUDFLARED if command.strip() == "cloudflared" else command
        host = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
        self._words = shlex.split(known.replace("{port}", str(port)).replace("{host}", host))
        self._timeout_s, self._url = timeout_s, url
        self._said: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._found: list[str] = []
        self.started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Its first URL, or the ConfigurationError of its first start."""

    async def run(self) -> None:
        """Run the program until cancelled."""
        delay_s = _AGAIN_S
        while True:
            try:
                await self._run_once()
                delay_s = _AGAIN_S  # it had a URL
            except (ConfigurationError, OSError) as error:
                if not self.started.done():
                    self.started.set_exception(ConfigurationError(str(error)))
                    return
                told = {"error": str(error), "delay_s": delay_s}
                logger.error("%(error)s; it is started again in %(delay_s)g s", told)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_AGAIN_S)

    async def _run_once(self) -> None:
        """Run the program once. Raises ConfigurationError if it has no URL in time; returns when it ends later."""
        program = self._words[0]
        if shutil.which(program) is None:
            raise ConfigurationError(f"--expose: {program} is not installed, or not in PATH")
        self._said.clear()
        self._found = []
        bound = (sys.executable, "-c", _BOUND, str(os.getpid()))
        process = await asyncio.create_subprocess_exec(
            *bound,
            *self._words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=_LINE_BYTES,
            start_new_session=True,
            env=_environment(os.environ),
        )
        ended = asyncio.create_task(process.wait())
        assert process.stdout is not None
        reading = asyncio.create_task(self._read(process.stdout))
        finding = asyncio.create_task(self._find())
        try:
            await asyncio.wait((ended, finding), return_when=asyncio.FIRST_COMPLETED, timeout=self._timeout_s)
            if not finding.done():
                raise ConfigurationError(f"--expose: {self._fault(process.returncode)}")
            url = finding.result()
            self._url.set(url)
            logger.info("exposed", {"url": url})
            if not self.started.done():
                self.started.set_result(url)
            code = await asyncio.shield(ended)
            self._url.set("")
            logger.warning("the tunnel (--expose) ended with exit code %(code)d", {"code": code})
        finally:
            self._url.set("")
            for task in (reading, finding):
                task.cancel()
            await asyncio.shield(_end(process.pid, ended))

    async def _read(self, output: asyncio.StreamReader) -> None:
        """Log the output, and note the URLs in it."""
        while True:
            try:
                line = await output.readline()
            except ValueError:  # a longer line
                continue
            if not line:
                return
            text = line.decode(errors="replace").strip()
            logger.debug("tunnel", {"line": text})
            self._said.append(text)
            for url in _URL.findall(text):
                url = url.rstrip("./")
                if url not in self._found and len(self._found) < _MOST_URLS:
                    self._found.append(url)

    async def _find(self) -> str:
        """The first printed URL that reaches this server."""
        import httpx

        async with httpx.AsyncClient(timeout=_PROBE_S) as client:
            while True:
                for url in tuple(self._found):
                    if await _reaches(client, url):
                        return url
                await asyncio.sleep(_PROBE_EVERY_S)

    def _fault(self, code: int | None) -> str:
        how = (
            f"did not print a URL that reaches this server within {self._timeout_s:g} s (--expose-timeout-s)"
            if code is None
            else f"ended with exit code {code} before a URL that it printed reached this server"
        )
        printed = f"its last output: {' | '.join(self._said)}" if self._said else "it printed nothing"
        return f"{shlex.join(self._words)} {how}; {printed}"


async def _reaches(client: object, url: str) -> bool:
    """Whether a URL leads to the listener for agents of this server, which proves itself."""
    import httpx

    assert isinstance(client, httpx.AsyncClient)
    token = secrets.token_hex(16)
    try:
        answer = await client.get(f"{url}/health", params={PROBE: token})
        return bool(answer.status_code == 200 and answer.json().get(PROBE) == proof_of(token))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError):
        return False


async def _end(pid: int, ended: asyncio.Task[int]) -> None:
    """End the program and what it has started: politely, then by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        if not ended.done():
            await asyncio.wait((ended,), timeout=_END_S)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of the program: all but those of this server, which have its keys."""
    return {name: value for name, value in variables.items() if not name.startswith(_HIDDEN)}
