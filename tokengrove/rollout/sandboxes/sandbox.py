"""Where a job runs: on this machine, in a container, or in a cluster. A remote one is a subclass of `Sandbox`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokengrove.errors import InvalidRequest

Command = str | Sequence[str]
"""A program with its arguments, or a text for the shell."""

DOWNLOAD_BYTES = 64 * 2**20
"""The largest file that is read from a sandbox."""


class CommandResult(NamedTuple):
    """`exit_code` is negative for a signal. `output`: the end of what was written to stdout and stderr."""

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
        """The end of what it has written so far."""

    @abstractmethod
    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        """Wait until the command ends; after `timeout_s` seconds it is killed, and the result is `timed_out`."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the command and what it has started, if they run."""


class Sandbox(ABC):
    """A place for one job: files and processes that no other job sees, and that are gone after `stop`.

    Paths are those in the sandbox; relative ones begin at its working folder, in which commands run, too.
    """

    local = False
    """Whether it shares this machine's ports, files and Python with others, so that a port may be taken."""

    def __init__(self, environment: Mapping[str, Any]) -> None:
        """`environment`: the section of that name in the job's configuration. `env` in it is set for all commands."""
        self.environment = environment

    @property
    @abstractmethod
    def working_folder(self) -> str:
        """The whole path of the folder in which commands run."""

    @property
    def scratch_folder(self) -> str:
        """The whole path of a folder for what is none of the agent's work."""
        return "/tmp"

    @abstractmethod
    async def start(self) -> None:
        """Make it ready to run commands."""

    @abstractmethod
    async def launch(
        self, command: Command, env: Mapping[str, str] | None = None, *, stdin: bytes = b"", output: Path | None = None
    ) -> SandboxProcess:
        """Start a command with these variables beside those of all commands. `stdin` is all that it can read there;
        `output` is a file of this machine that its output is added to. A subclass for jobs, which give neither, may
        leave both out.
        """

    @abstractmethod
    async def upload(self, path: str, content: bytes) -> None:
        """Write a file; its folders are made."""

    @abstractmethod
    async def download(self, path: str) -> bytes:
        """Read a file. Raises FileNotFoundError, also for a path that is no file, and ValueError for a larger one than
        DOWNLOAD_BYTES.
        """

    def address(self, port: int) -> str | None:
        """The URL by which this program reaches what listens on `port` of 127.0.0.1 in the sandbox.

        None, the default, if nothing leads there but commands.
        """
        return None

    async def kill_all(self) -> None:
        """Kill what runs in the sandbox, and keep the files. Raises InvalidRequest where a subclass cannot."""
        raise InvalidRequest(f"{type(self).__name__} cannot kill the processes of its agent alone: give it `kill_all`")

    @abstractmethod
    async def stop(self) -> None:
        """Kill all processes of the sandbox and remove its files; also if it did not start. Again: nothing."""

    async def run(
        self, command: Command, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> CommandResult:
        """Run a command until it ends, or is killed after `timeout_s` seconds."""
        process = await self.launch(command, env)
        return await process.wait(timeout_s)

    async def read_file(self, path: str) -> str:
        """Read a file of text, as `download` does. Raises ValueError for bytes that are no UTF-8."""
        return (await self.download(path)).decode()


def too_large(path: str) -> ValueError:
    """The error of a file with more than DOWNLOAD_BYTES."""
    return ValueError(f"{path} has more than {DOWNLOAD_BYTES} bytes, which is all that is read from a sandbox")
