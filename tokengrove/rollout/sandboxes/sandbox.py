"""The interface of sandboxes, in which jobs run: on this machine, in a container, or in a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokengrove.errors import InvalidRequest

Command = str | Sequence[str]
"""A program with its arguments, or a script for the shell."""

DOWNLOAD_BYTES = 64 * 2**20
"""The maximum size of a file that is read from a sandbox."""


class CommandResult(NamedTuple):
    """The result of a command. `exit_code`: negative for a signal. `output`: the end of its stdout and stderr."""

    exit_code: int
    output: str
    timed_out: bool = False


class SandboxProcess(ABC):
    """A command that was started in a sandbox."""

    pid: int

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the command has ended."""

    @property
    @abstractmethod
    def output(self) -> str:
        """The end of the output so far."""

    @abstractmethod
    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        """Wait until the command ends. After `timeout_s` seconds it is killed, and the result is `timed_out`."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the command and the processes that it has started, if they run."""


class Sandbox(ABC):
    """A place for one job, with its own files and processes, which `stop` removes.

    Paths are paths in the sandbox. Relative paths begin at its working folder, in which commands also run.
    """

    local = False
    """Whether it shares this machine's ports, files and Python with other jobs, so that a port may be in use."""

    elsewhere = False
    """Whether it is on another machine, which does not reach loopback addresses of this one."""

    def __init__(self, environment: Mapping[str, Any]) -> None:
        """`environment`: the section with this name in the job's configuration. Its `env` is set for all commands."""
        self.environment = environment

    @property
    @abstractmethod
    def working_folder(self) -> str:
        """The absolute path of the folder in which commands run."""

    @property
    def scratch_folder(self) -> str:
        """The absolute path of a folder for files that are not part of the agent's work."""
        return "/tmp"

    @abstractmethod
    async def start(self) -> None:
        """Make the sandbox ready to run commands."""

    @abstractmethod
    async def launch(
        self, command: Command, env: Mapping[str, str] | None = None, *, stdin: bytes = b"", output: Path | None = None
    ) -> SandboxProcess:
        """Start a command with these variables in addition to those of all commands.

        `stdin`: the whole input of the command. `output`: a file of this machine to which the output is appended. A
        subclass that only runs jobs, which use neither, may omit both.
        """

    @abstractmethod
    async def upload(self, path: str, content: bytes) -> None:
        """Write a file and create its folders."""

    @abstractmethod
    async def download(self, path: str) -> bytes:
        """Read a file.

        Raises FileNotFoundError if it does not exist or is not a file, and ValueError if it is larger than
        DOWNLOAD_BYTES.
        """

    def address(self, port: int) -> str | None:
        """The URL at which this program reaches a server on `port` of 127.0.0.1 in the sandbox.

        None, the default, if the sandbox is reached only by commands.
        """
        return None

    async def kill_all(self) -> None:
        """Kill all processes in the sandbox and keep its files. Raises InvalidRequest if a subclass cannot do this."""
        raise InvalidRequest(f"{type(self).__name__} cannot kill the processes of its agent: implement `kill_all`")

    @abstractmethod
    async def stop(self) -> None:
        """Kill all processes of the sandbox and remove its files, also after a failed start. May be called twice."""

    async def run(
        self, command: Command, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> CommandResult:
        """Run a command until it ends. After `timeout_s` seconds it is killed."""
        process = await self.launch(command, env)
        return await process.wait(timeout_s)

    async def read_file(self, path: str) -> str:
        """Read a text file, like `download`. Raises ValueError for content that is not UTF-8."""
        return (await self.download(path)).decode()


def too_large(path: str) -> ValueError:
    """The error for a file with more than DOWNLOAD_BYTES."""
    return ValueError(
        f"{path} has more than {DOWNLOAD_BYTES} bytes, the maximum size of a file that is read from a sandbox"
    )
