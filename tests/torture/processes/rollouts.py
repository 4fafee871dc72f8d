"""Runs of `tokengrove rollout` that are interrupted and killed, and go on later."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import httpx

from tests.e2e.load import check_database
from tests.e2e.processes import Command
from tests.torture.processes.place import Place

_AGENT = """
import asyncio, json, os, sys, time, urllib.request

def ask(url, number, key="none"):
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": f"turn {number}"}]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()

def blocks(task, base_url, api_key, sample):
    for number in range(task["turns"]):
        ask(base_url, number, api_key)
        time.sleep(task["wait_s"])
    return float(sample)

async def awaits(task, base_url, api_key, sample):
    for number in range(task["turns"]):
        await asyncio.to_thread(ask, base_url, number, api_key)
        await asyncio.sleep(task["wait_s"])
    return float(sample)

if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        ask(os.environ["OPENAI_BASE_URL"], number, os.environ["OPENAI_API_KEY"])
"""
_ENGINE = ("engine=scripted", "engine_arg=tokens=4")
_MARK = "TORTURE_PLACE"
_TASKS, _SAMPLES = 4, 2
_INTERRUPTED = 130
_GONE_S = 20.0


@dataclass
class _Run:
    """A run. `served`: the database, unless its server is its own. `turns`: those of each task.

    `lines`: those of its journal that were there when a process of it had ended. `killed`: one of them was killed.
    """

    place: Place
    flags: tuple[str, ...]
    served: Path | None
    turns: dict[str, int]
    lines: list[str] = field(default_factory=list)
    killed: bool = False

    @property
    def folder(self) -> Path:
        found = list((self.place.folder / "runs").glob("*"))
        assert len(found) <= 1, f"the same command begins another run: {found}"
        return found[0] if found else self.place.folder / "none"

    @property
    def database(self) -> Path:
        return self.served or self.folder / "tokengrove.db"

    @property
    def over(self) -> bool:
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
        return bool(summary.get("complete") and summary["output"])

    def start(self) -> Command:
        temporary = self.place.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = {_MARK: str(self.place.folder), "TMPDIR": str(temporary), "COLUMNS": "200"}
        return Command("rollout", *self.flags, cwd=self.place.folder, **environment)

    async def play(self) -> None:
        """Play the run to its end."""
        ended = await self._ended(self.start())
        assert ended.returncode == 0, f"exit code {ended.returncode} of a run that nobody interrupted: {ended.stderr}"

    async def interrupt(self) -> None:
        """Play the run until a moment that the seed chooses."""
        command = self.start()
        await self._moment(command)
        number = self.place.chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL])
        self.killed |= number == signal.SIGKILL
        _send(command, number)
        if number != signal.SIGKILL and self.place.chance.random() < 0.2:
            self.killed = True
            await self.place.some_time(0.2)
            _send(command, number)
        ended = await self._ended(command)
        allowed = {0, -number if number == signal.SIGKILL else _INTERRUPTED}
        assert ended.returncode in allowed, f"exit code {ended.returncode} after {number.name}: {ended.stderr}"

    async def _moment(self, command: Command) -> None:
        """Wait until a process has begun with the run and for some time, which is mostly while episodes are played."""
        chance, journal = self.place.chance, "journal.jsonl"
        early = chance.random() < 0.2
        lines = 0 if early else chance.randint(0, _TASKS * _SAMPLES - 1)
        for _ in range(10_000):
            begun = _has_open(command.pid, journal) and (self.folder / journal).read_text().count("\n") >= lines
            if begun or not command.alive:
                break
            await asyncio.sleep(0.005)
        await self.place.some_time(1.0 if early else chance.choice([0.0, 0.1]))

    async def _ended(self, command: Command) -> CompletedProcess[str]:
        """Wait for the end of a process, and check what it leaves."""
        ended = await asyncio.to_thread(command.wait)
        self.place.output += ended.stdout + ended.stderr
        assert "Traceback" not in ended.stdout + ended.stderr, "a traceback of a run"
        await self._nothing_is_left()
        self._check_journal()
        if not self.killed:
            left = [session for session in self._sessions() if session[1] != "Finished"]
            assert not left, f"an interrupted run leaves sessions that were not played to their end: {left}"
        return ended

    async def _nothing_is_left(self) -> None:
        """Wait until the processes of the run and the folders of its commands are gone."""
        left: list[str] = []
        for _ in range(round(_GONE_S / 0.05)):
            left = [*_marked(f"{_MARK}={self.place.folder}"), *map(str, (self.place.folder / "tmp").iterdir())]
            if not left:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"a run that has ended leaves {left}")

    def _check_journal(self) -> None:
        """What was recorded stays, once for each episode, and its session has ended."""
        path = self.folder / "journal.jsonl"
        text = path.read_text() if path.exists() else ""
        before, self.lines = self.lines, text[: text.rfind("\n") + 1].splitlines()
        assert self.lines[: len(before)] == before, f"lines of the journal have changed: {before}"
        episodes = Counter((entry["task_id"], entry["sample"]) for entry in self.entries)
        assert all(count == 1 for count in episodes.values()), f"recorded twice: {episodes}"
        finished = dict(self._sessions())
        recorded = {entry["session_id"]: finished.get(entry["session_id"]) for entry in self.entries}
        assert all(outcome == "Finished" for outcome in recorded.values()), f"recorded before their end: {recorded}"

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def _sessions(self) -> list[tuple[str, str]]:
        """The id and the outcome of each session that counts, if the server came to make its tables."""
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(self.database, timeout=30)) as database:
            if database.execute("SELECT name FROM sqlite_master WHERE name = 'sessions'").fetchone() is None:
                return []
            counted = "FROM sessions WHERE withdrawn_at IS NULL"
            return database.execute(f"SELECT session_id, coalesce(outcome, status) {counted}").fetchall()

    def check(self) -> None:
        """Check that each episode was recorded and exported once, and that nothing else counts."""
        turns = {entry["session_id"]: entry["turns"] for entry in self.entries}
        for entry in self.entries:
            assert (entry["failure"], entry["turns"]) == (None, self.turns[entry["task_id"]]), entry
        episodes = {(entry["task_id"], entry["sample"]) for entry in self.entries}
        assert episodes == {(task, sample) for task in self.turns for sample in range(_SAMPLES)}, episodes
        stored = sorted(session for session, _ in self._sessions())
        assert stored == sorted(turns), f"{stored} count, and {sorted(turns)} were recorded"
        lines = (self.folder / "samples.jsonl").read_text().splitlines()
        exported = Counter(json.loads(line)["session_id"] for line in lines)
        assert exported == turns, f"turns in the samples: {exported}, as recorded: {turns}"


async def rollouts_that_are_interrupted(place: Place) -> None:
    """`tokengrove rollout` is interrupted and killed, and begun again until it ends: each episode counts once."""
    turns = {f"t{number}": place.chance.randint(1, 3) for number in range(_TASKS)}
    tasks = [{"task_id": task, "turns": count, "wait_s": place.chance.uniform(0, 0.1)} for task, count in turns.items()]
    (place.folder / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    (place.folder / "player.py").write_text(_AGENT)
    if place.chance.random() < 0.2:
        server = [word for setting in _ENGINE for word in ("--server", setting)]
        await _play(_Run(place, _flags(place, *server), None, turns), 1)
    else:
        async with place.server(*(word for setting in _ENGINE for word in _flag(setting))) as url:
            run = _Run(place, _flags(place, "--url", url), place.folder / "served.db", turns)
            await _play(run, place.chance.choice([1, 1, 2]))
            await _check_default_export(url, {entry["session_id"]: entry["turns"] for entry in run.entries})


async def _play(run: _Run, times: int) -> None:
    for _ in range(times):
        if not run.over:
            await run.interrupt()
    if not run.over:
        await run.play()
    run.check()
    await asyncio.to_thread(check_database, f"sqlite:///{run.database}")


async def _check_default_export(url: str, turns: Mapping[str, int]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = (await http.post("/export_trajectories", json={"layout": "individual"})).json()
    exported = Counter(sample["session_id"] for sample in body["samples"])
    assert exported == turns, f"turns in the server's export: {exported}, as recorded: {turns}"


def _flags(place: Place, *server: str) -> tuple[str, ...]:
    """The options of a run, whose agent is a function, a coroutine or a command, in this process or in others."""
    common = ("--data", "tasks.jsonl", "--group-size", str(_SAMPLES), "--layout", "individual")
    named = ("--name", "n") if place.chance.random() < 0.5 else ()
    more = (*named, "--concurrency", str(place.chance.randint(1, 6)), *server)
    if place.chance.random() < 0.2:
        more = (*more, "--executor", "process", "--workers", "2")
    if place.chance.random() < 0.3:
        command = (sys.executable, str(place.folder / "player.py"), "{data.turns}")
        return (*common, *more, "--env", f"{_MARK}={place.folder}", "--", *command)
    return (place.chance.choice(["player:blocks", "player:awaits"]), *common, *more)


def _flag(setting: str) -> tuple[str, str]:
    """A setting of a server as a flag of `tokengrove serve`."""
    name, _, value = setting.partition("=")
    return f"--{name.replace('_', '-')}", value


def _send(command: Command, number: signal.Signals) -> None:
    if command.alive:
        os.kill(command.pid, number)


def _has_open(pid: int, name: str) -> bool:
    """Whether a process has a file of that name open."""
    with suppress(OSError):
        return any(os.readlink(path).endswith(f"/{name}") for path in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _marked(mark: str) -> Iterator[str]:
    """The processes whose environment has a variable, and their words."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                yield f"{path.name}: {(path / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
