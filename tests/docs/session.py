"""A document, followed as a reader would: one folder, one shell, one server.

The address http://127.0.0.1:8080 in a block becomes that of the server. A bash block that is only `tokengrove serve
...` starts it, in place of the one before; a page without such a block gets a server with the scripted engine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from unittest import mock

from typer.testing import CliRunner

from proxy.serving.server import serving
from proxy.settings import Settings
from tests.docs.pages import ROOT, Block
from tests.support import shared_renderer
from tokengrove import commands

ADDRESS = "127.0.0.1:8080"
_SERVE = re.compile(r"(?:[A-Z_]+=\S+\s+)*tokengrove serve\b")
_START_S, _BLOCK_S, _LONG_S = 120.0, 90.0, 800.0
_KEPT = ".shell"
_OWN_PROCESS = ("scripted", "mailbox", "transformers")
"""Servers that name one of these engines run in the process of the test, which saves a start and torch's import."""


class ServerProcess:
    """`tokengrove serve`, as typed, on a free port."""

    def __init__(self, command: str, folder: Path, environment: dict[str, str]) -> None:
        words = [word for word in shlex.split(command, comments=True)]
        if "--port" in words:
            at = words.index("--port")
            del words[at : at + 2]
        line = "exec env " + shlex.join([*words, "--port", "0"])
        self._process = subprocess.Popen(
            ["bash", "-c", line],
            cwd=folder,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output, self._listens = "", threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._listens.wait(_START_S)
        found = re.search(r" at (http://\S+)", self.output)
        if found is None:
            self.close()
            raise AssertionError(f"{command} did not start:\n{self.output}")
        self.url = found[1]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(_START_S)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            if " at http://" in line:
                self._listens.set()
        self._listens.set()


def settings_of(command: str) -> Settings:
    """The settings with which a `tokengrove serve ...` would start. Raises AssertionError if it would not."""
    found: list[Settings] = []
    words = shlex.split(command, comments=True)
    with (
        mock.patch("proxy.serving.server.run", lambda settings, _: found.append(settings)),
        mock.patch("proxy.serving.stop.end_at_signal"),
        mock.patch("proxy.telemetry.log.set_up"),  # the test's own output is no file
        mock.patch("proxy.serving.stop.end_process"),  # else this process would end, with exit code 0
    ):
        run = CliRunner().invoke(commands.app, words[words.index("serve") :])
    assert found, f"{command} does not start: {run.output} {run.exception}"
    return found[0]


class PageSession(AbstractContextManager["PageSession"]):
    """Runs the blocks of one document in order. With `long`, also those that are marked so.

    Servers and files live in `folder`; commands run there too, unless the page is about a checkout (`inside`).
    """

    def __init__(self, folder: Path, *, long: bool = False, inside: Path | None = None) -> None:
        self._folder, self._long, self._inside = folder, long, inside or folder
        self._environment = _environment(folder)
        self._stack = ExitStack()
        self._url: str | None = None
        self._script = ""
        self._skipping = False

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def follow(self, blocks: list[Block]) -> None:
        """Run all blocks. Raises AssertionError naming the first that fails, or whose reply has another shape."""
        printed: str | None = None
        for at, block in enumerate(blocks):
            after = blocks[at + 1] if at + 1 < len(blocks) else None
            if block.directive == "file":
                path = self._folder / block.argument
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif self._skips(block):
                printed = None
            elif block.language == "bash":
                printed = self._bash(block)
                shown = after is not None and after.language == "json" and after.directive != "not run"
                _check_no_error(block, printed, shown)
            elif block.language == "python":
                waits = after is not None and after.directive == "continues"
                printed = self._python(block, run=not waits)
            elif printed is None:
                continue  # a block that did not run has no output to compare
            elif block.directive == "prints":
                assert _lines(printed) == _lines(block.text), f"{block.place}: this is printed instead:\n{printed}"
            elif block.language == "json":
                check_shape(block, json.loads(block.text), _last_json(block, printed))

    def _skips(self, block: Block) -> bool:
        """Whether a block is not run now; what continues a script goes with it."""
        if block.directive != "continues":
            match block.directive:
                case "long":
                    self._skipping = not self._long
                case "needs":
                    self._skipping = find_spec(block.argument) is None
                case directive:
                    self._skipping = directive == "not run"
        return self._skipping

    def _bash(self, block: Block) -> str:
        command = "\n".join(line for line in block.text.splitlines() if not line.startswith("#")).strip()
        ends = block.directive == "fails" or "--print-config" in command
        if _SERVE.match(command) and "\n" not in command.replace("\\\n", "") and not ends:
            self._serve(command.replace("\\\n", ""))
            return ""
        kept = self._folder / _KEPT
        # Variables live on, as in the one terminal that a reader has open.
        text = f"[ -f {kept} ] && . {kept}\nset -a\ntrap 'export -p > {kept}' EXIT\n{self._addressed(block.text)}"
        return self._run(block, ["bash", "-euo", "pipefail", "-c", text])

    def _python(self, block: Block, *, run: bool) -> str:
        self._script = self._script + block.text if block.directive == "continues" else block.text
        if not run:
            return ""
        file = self._folder / ".block.py"
        file.write_text(self._addressed(self._script), encoding="utf-8")
        return self._run(block, [sys.executable, str(file)])

    def _run(self, block: Block, command: list[str]) -> str:
        # Output goes to files: a background process of a block would keep a pipe open.
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as said:
            run = subprocess.run(
                command,
                cwd=self._inside,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=said,
                timeout=_LONG_S if block.directive == "long" else _BLOCK_S,
                check=False,
            )
            texts = [_whole(printed), _whole(said)]
        failed = run.returncode != 0
        told = "\n".join((f"{block.place} ended with {run.returncode}:", block.text, *texts))
        assert failed == (block.directive == "fails"), told
        return texts[0]

    def _serve(self, command: str) -> None:
        self._stack.close()
        settings = settings_of(command)
        if settings.engine in _OWN_PROCESS:
            self._start(settings)
            return
        server = self._stack.enter_context(closing(ServerProcess(command, self._folder, self._environment)))
        self._url = server.url

    def _start(self, settings: Settings) -> None:
        settings = self._own(settings)
        own = (settings.model, settings.tokenizer, settings.family, settings.tool_parser, settings.reasoning_parser)
        with nullcontext() if any(own) else shared_renderer(settings):
            self._url = self._stack.enter_context(serving(settings))

    def _own(self, settings: Settings) -> Settings:
        """The settings of a server in this process, on a free port, with its database in the folder of the page."""
        database = settings.database_url.replace("sqlite:///", f"sqlite:///{self._folder}/")
        model = None if settings.model is None else str(self._folder / settings.model)
        return replace(settings, port=0, database_url=database, model=model, log_level="warning")

    def _addressed(self, text: str) -> str:
        if ADDRESS not in text and "localhost:8080" not in text:
            return text
        if self._url is None:
            settings = Settings(engine="scripted", engine_arg=("play=agent",))
            self._start(settings)
        host = self._url.removeprefix("http://")
        return text.replace(ADDRESS, host).replace("localhost:8080", host)


def check_shape(block: Block, shown: Any, real: Any, at: str = "reply") -> None:
    """Raise AssertionError unless a reply has the fields and types that the document shows.

    A list may be shown shorter than it is. Any number stands for any other.
    """
    assert _kind(shown) == _kind(real), f"{block.place}: {at} is shown as {shown!r}, and is {real!r}"
    if isinstance(shown, dict):
        assert set(shown) == set(real), f"{block.place}: {at} is shown with {sorted(shown)}, and has {sorted(real)}"
        for name, value in shown.items():
            check_shape(block, value, real[name], f"{at}.{name}")
    if isinstance(shown, list):
        assert len(shown) <= len(real), f"{block.place}: {at} is shown with {len(shown)} entries, and has {len(real)}"
        assert bool(shown) == bool(real), f"{block.place}: {at} is shown empty, and is {real!r}"
        for number, value in enumerate(shown):
            check_shape(block, value, real[number], f"{at}[{number}]")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)


def _last_json(block: Block, printed: str) -> Any:
    for text in (printed, *reversed(printed.strip().splitlines())):
        try:
            return json.loads(text)
        except ValueError:
            continue
    raise AssertionError(f"{block.place} shows a reply, and the command printed no JSON:\n{printed}")


def _check_no_error(block: Block, printed: str, shown: bool) -> None:
    """An error counts as success for curl; only a document that shows it may get one."""
    for line in printed.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        failed = isinstance(value, dict) and value.get("error") is not None
        assert shown or not failed, f"{block.place} was refused:\n{block.text}\n{line}"


def _environment(folder: Path) -> dict[str, str]:
    """`tokengrove` and `python` are those of the tests, whether or not the package is installed."""
    tools = folder / ".bin"
    tools.mkdir()
    for name, arguments in (("tokengrove", " -m tokengrove"), ("python", ""), ("python3", "")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{arguments} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENGROVE_")}
    return {**kept, "PATH": f"{tools}:{kept['PATH']}", "PYTHONPATH": str(ROOT)}
