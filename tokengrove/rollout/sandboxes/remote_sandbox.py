"""A sandbox at a provider, reached through the provider's SDK, whose calls block and therefore run in threads.

At most `max_concurrent` sandboxes of a provider exist per process. A sandbox is deleted by `stop`; if this process is
killed, by a process next to it; and if the machine fails, by the provider after `max_lifetime_s`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import re
import shlex
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.failures import WorkerDied
from tokengrove.rollout.sandboxes.cleaning import MARK
from tokengrove.rollout.sandboxes.gate import Gate
from tokengrove.rollout.sandboxes.remote_cleaning import owner_of
from tokengrove.rollout.sandboxes.remote_process import RemoteProcess, killing, starting
from tokengrove.rollout.sandboxes.remote_settings import RemoteSettings, read_settings
from tokengrove.rollout.sandboxes.sandbox import DOWNLOAD_BYTES, Command, Sandbox, too_large
from tokengrove.rollout.threads import in_thread

T = TypeVar("T")
OWNER = "tokengrove-owner"
"""The label of a sandbox with the owner that `remote_cleaning` knows."""
EXPERIMENT = "tokengrove-experiment"
"""The label of a sandbox with the name of its experiment."""
_SEPARATOR, _MOST_LABEL = re.compile("[^A-Za-z0-9]+"), 63  # what Kubernetes takes as a label
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""The pauses before a call is repeated, each up to half longer at random."""
_log = logging.getLogger(__name__)


class SandboxLost(WorkerDied):
    """The provider could not start a sandbox or no longer reaches it. The episode can be played again elsewhere."""


class RemoteSandbox(Sandbox):
    """A subclass implements the calls of its provider: `create`, `execute`, `write`, `read`, `delete`, `delete_all`.

    These calls block, and may be repeated. They raise exceptions of the SDK; `is_transient` says after which ones a
    call is repeated.
    """

    extra: ClassVar[str]
    """The extra of this package that installs the SDK, and the provider's name."""
    elsewhere = True
    kind: ClassVar[type[RemoteSettings]] = RemoteSettings
    account: ClassVar[tuple[str, ...]] = ()
    """The names of the settings that say where `delete_all` looks, such as a namespace."""
    required: ClassVar[tuple[str, ...]] = ()
    """The names of the settings, texts, without which no sandbox can be created."""
    _gates: ClassVar[dict[str, Gate]] = {}

    def __init__(self, environment: Mapping[str, Any]) -> None:
        """Raises ConfigurationError for a wrong setting, and if the provider's SDK is not installed."""
        super().__init__(environment)
        self._mark = uuid.uuid4().hex
        self.settings = read_settings(self.kind, environment)
        for name in self.required:
            if getattr(self.settings, name) is None:
                raise ConfigurationError(f"{type(self).__name__} needs {name}")
        try:
            self.connect()
        except ImportError as error:
            raise ConfigurationError(
                f"{type(self).__name__} needs the SDK of {self.extra} (no module {error.name!r}): "
                f"pip install 'tokengrove[{self.extra}]'"
            ) from error
        self._numbers = itertools.count()
        self._processes: list[RemoteProcess] = []
        self._working_folder = self._scratch = ""
        self._entered = self._stopped = False

    @abstractmethod
    def connect(self) -> None:
        """Import the SDK and check that its credentials exist. Raises ImportError and ConfigurationError."""

    @abstractmethod
    def create(self, labels: Mapping[str, str]) -> None:
        """Create the sandbox with these labels, and wait until it runs commands."""

    @abstractmethod
    def execute(self, script: str, env: Mapping[str, str]) -> tuple[int, str]:
        """Run a short script with these variables; return its exit code and its stdout."""

    @abstractmethod
    def write(self, path: str, content: bytes) -> None:
        """Write a file to an absolute path, and create its folders."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a file at an absolute path."""

    @abstractmethod
    def delete(self) -> None:
        """Delete the sandbox, if it was created and exists."""

    @abstractmethod
    def delete_all(self, owner: str) -> int:
        """Delete all sandboxes whose label OWNER has this value, and return how many there were."""

    @abstractmethod
    def is_transient(self, error: Exception) -> bool:
        """Whether a call may succeed when it is repeated: no connection, too many requests, an error of the service."""

    @property
    def working_folder(self) -> str:
        if not self._working_folder:
            raise InvalidRequest("the sandbox has not been started")
        return self._working_folder

    @property
    def scratch_folder(self) -> str:
        return self._scratch

    async def start(self) -> None:
        limits = self.settings
        assert limits.max_concurrent is not None
        await self._gate.enter(limits.max_concurrent)
        self._entered = True
        # Nothing else: `env` may have secrets, and the settings of one process may differ by task.
        place = {name: getattr(limits, name) for name in (*self.account, "max_concurrent")}
        place |= dict.fromkeys(self.required, "unused")
        labels = {OWNER: await in_thread(lambda: owner_of(type(self), place), "tokengrove-sandbox-cleaner")}
        if experiment := _SEPARATOR.sub("-", limits.experiment_id or "")[:_MOST_LABEL].strip("-"):
            labels[EXPERIMENT] = experiment
        try:
            # To the end: a creation that goes on in its thread after a cancellation would not be deleted by `stop`.
            await to_the_end(self._called(lambda: self.create(labels), "start"))
            work = '"$HOME/work"' if limits.workdir is None else shlex.quote(limits.workdir)
            told = await self._printed(f'mkdir -p {work} && cd {work} && echo "${{TMPDIR:-/tmp}}" && pwd')
            self._scratch, self._working_folder = told.splitlines()[-2:]
        except BaseException:
            await to_the_end(self.stop())
            raise

    async def stop(self) -> None:
        for process in self._processes:
            process.forget()
        if self._stopped or not self._entered:
            return
        self._stopped = True
        try:
            await self._called(self.delete, "delete")
        except SandboxLost as error:
            _log.warning("%s; it is deleted after its lifetime of %g s", error, self.settings.max_lifetime_s)
        finally:
            self._gate.leave()

    async def launch(
        self, command: Command, env: Mapping[str, str] | None = None, *, stdin: bytes = b"", output: Path | None = None
    ) -> RemoteProcess:
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        number = next(self._numbers)
        mark, folder = f"{self._mark}-{number}.", f"{self._control}/{number}"
        own = {**self.settings.env, **(env or {}), MARK: mark}
        work = shlex.quote(self.working_folder)
        program = f"mkdir -p {work} && cd {work} && exec {shlex.join(words)}\n"
        await self._called(lambda: self.write(f"{folder}/run", program.encode()), "write to")
        if stdin:
            await self._called(lambda: self.write(f"{folder}/in", stdin), "write to")
        pid = await self._printed(starting(folder, f"{folder}/in" if stdin else "/dev/null"), own)

        async def kill() -> None:
            await self._printed(killing(self._control, mark, str(number)))

        process = RemoteProcess(int(pid), folder, self._printed, kill, output)
        self._processes = [*(each for each in self._processes if not each.ended), process]
        return process

    async def kill_all(self) -> None:
        """Kill the processes that were started here and their children, unless these cleared their environment."""
        await self._printed(killing(self._control, f"{self._mark}-", "[0-9]*"))
        for process in self._processes:
            await asyncio.wait([process.following])

    async def upload(self, path: str, content: bytes) -> None:
        absolute = self._absolute(path)
        await self._called(lambda: self.write(absolute, content), "write to")

    async def download(self, path: str) -> bytes:
        absolute = self._absolute(path)
        name = shlex.quote(absolute)
        size = (await self._printed(f"if [ -f {name} ]; then wc -c <{name}; fi")).strip()
        if not size:
            raise FileNotFoundError(path)
        if int(size) > DOWNLOAD_BYTES:
            raise too_large(path)
        return await self._called(lambda: self.read(absolute), "read from")

    @property
    def _gate(self) -> Gate:
        return self._gates.setdefault(self.extra, Gate())

    @property
    def _control(self) -> str:
        """The folder of the files of its processes."""
        return f"{self._scratch}/.tokengrove-{self._mark}"

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.working_folder}/{path}"

    async def _printed(self, script: str, env: Mapping[str, str] | None = None) -> str:
        """What a script prints. Raises RuntimeError if it fails, and SandboxLost."""
        code, output = await self._called(lambda: self.execute(script, env or {}), "run a command in")
        if code:
            raise RuntimeError(f"a command in the sandbox exited with {code}: {output[-500:].strip()}")
        return output

    async def _called(self, call: Callable[[], T], what: str) -> T:
        """Call the provider; repeat after transient errors. Raises SandboxLost with the provider's error."""
        pauses = iter(_PAUSES_S)
        while True:
            try:
                return await in_thread(call, f"tokengrove-sandbox-{self.extra}")
            except ConfigurationError:
                raise
            except Exception as error:
                pause_s = next(pauses, None) if self.is_transient(error) else None
                if pause_s is None:
                    told = f"{type(error).__name__}: {error}"
                    raise SandboxLost(f"cannot {what} a sandbox of {self.extra}: {told}") from error
                _log.info("%s: cannot %s a sandbox (%s); trying again", self.extra, what, error)
            await asyncio.sleep(pause_s * random.uniform(1, 1.5))
