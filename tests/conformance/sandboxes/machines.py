"""What stands behind a provider's stand-in: each sandbox is a folder of this machine, in which commands really run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from tokengrove.rollout.sandboxes.cleaning import clean


@dataclass
class Machine:
    """One sandbox. `about`: what it was created with."""

    folder: Path
    about: dict[str, Any]

    @property
    def variables(self) -> dict[str, str]:
        return {"HOME": f"{self.folder}/home", "TMPDIR": f"{self.folder}/tmp", "PATH": os.environ["PATH"]}

    def run(self, words: Sequence[str], env: Mapping[str, str], stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """The exit code, stdout and stderr of a program."""
        done = subprocess.run(
            list(words),
            env={**self.variables, **env},
            cwd=self.folder / "home",
            input=stdin,
            capture_output=True,
            start_new_session=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    async def start(self, words: Sequence[str]) -> asyncio.subprocess.Process:
        """A program whose input and outputs are pipes."""
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *words,
            env=self.variables,
            cwd=self.folder / "home",
            **{"stdin": pipe, "stdout": pipe, "stderr": pipe},
            start_new_session=True,
        )


@dataclass
class Machines:
    """The sandboxes of a provider. `busy`: so many creations are refused first."""

    parent: Path
    running: dict[str, Machine] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    busy: int = 0

    def create(self, about: dict[str, Any]) -> str:
        name = f"box{uuid.uuid4().hex[:12]}"
        folder = self.parent / name
        for each in ("home", "tmp"):
            (folder / each).mkdir(parents=True)
        self.asked.append(about)
        self.running[name] = Machine(folder, about)
        return name

    def delete(self, name: str) -> bool:
        machine = self.running.pop(name, None)
        if machine is not None:
            clean(str(machine.folder), f"unused-{name}")
            shutil.rmtree(machine.folder, ignore_errors=True)
        return machine is not None


def write(path: Path, content: bytes) -> None:
    """Write a file and create its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """An ASGI application on a free port of this machine; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="wsproto", lifespan="off"))
    started = threading.Event()
    startup = server.startup

    async def told(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = told  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(60)
