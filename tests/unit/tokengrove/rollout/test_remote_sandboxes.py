"""How many remote sandboxes exist at once, which errors of a provider pass, and that none is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import until
from tests.unit.tokengrove.rollout.folder_sandbox import PARENT, Busy, FolderSandbox, made
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.sandboxes import remote_cleaning, remote_sandbox
from tokengrove.rollout.sandboxes.by_name import PROVIDERS, sandbox_class
from tokengrove.rollout.sandboxes.remote_sandbox import EXPERIMENT, SandboxLost

OWNER_PROGRAM = """
import asyncio, os, sys
from tests.unit.tokengrove.rollout.folder_sandbox import FolderSandbox
from tokengrove.rollout.sandboxes import remote_cleaning

async def main():
    for _ in range(3):
        sandbox = FolderSandbox({"max_concurrent": 3})
        await sandbox.start()
        await sandbox.launch("exec sleep 1000")
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PARENT, str(tmp_path))
    monkeypatch.setattr(remote_sandbox, "_PAUSES_S", (0.0, 0.0))
    return tmp_path


async def test_no_more_exist_at_once_than_allowed_and_who_waits_is_let_in_in_order() -> None:
    first, second = FolderSandbox({"max_concurrent": 2}), FolderSandbox({"max_concurrent": 2})
    await asyncio.gather(first.start(), second.start())
    order: list[int] = []

    async def later(number: int) -> FolderSandbox:
        sandbox = FolderSandbox({"max_concurrent": 2})
        await sandbox.start()
        order.append(number)
        return sandbox

    waiting = [asyncio.create_task(later(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert len(made()) == 2
    await first.stop()
    third = await waiting[0]
    assert (order, len(made())) == ([0], 2)
    waiting[1].cancel()
    await second.stop()
    fifth = await waiting[2]
    assert order == [0, 2]
    await third.stop()
    await fifth.stop()
    assert made() == []


async def test_the_name_of_an_experiment_is_a_label_that_every_provider_takes() -> None:
    sandbox = FolderSandbox({"max_concurrent": 1, "experiment_id": "Oak & elm, " + "x" * 100})
    await sandbox.start()
    labels = json.loads((sandbox.folder / "labels").read_text())
    assert labels[EXPERIMENT] == f"Oak-elm-{'x' * 55}"
    await sandbox.stop()


async def test_sandboxes_of_several_event_loops_share_the_limit() -> None:
    here = FolderSandbox({"max_concurrent": 1})
    await here.start()
    seen: list[int] = []

    async def there() -> None:
        sandbox = FolderSandbox({"max_concurrent": 1})
        await sandbox.start()
        seen.append(len(made()))
        await sandbox.stop()

    thread = threading.Thread(target=lambda: asyncio.run(there()))
    thread.start()
    await here.stop()
    await asyncio.to_thread(thread.join)
    assert seen == [1]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "max_concurrent is missing: each sandbox costs money"),
        ({"max_concurrent": 0}, "max_concurrent must be at least 1"),
        ({"max_concurrent": "many"}, "max_concurrent must be"),
        ({"max_concurrent": 1, "max_lifetime": 60}, "'max_lifetime' is not a setting.*known: max_lifetime_s"),
        ({"max_concurrent": 1, "workdir": "work"}, "workdir must be an absolute path"),
    ],
)
def test_wrong_settings_are_refused_by_name(environment: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        FolderSandbox(environment)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_missing_sdk_is_one_error_that_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"kubernetes": {"image": "debian"}, "agent-sandbox": {"warm_pool": "pool"}}
    extra = "kubernetes" if name in needed else name
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'tokengrove\[{extra}\]'"):
        sandbox_class(name)({"max_concurrent": 1, **needed.get(name, {})})


def test_an_unknown_provider_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match="known: e2b"):
        sandbox_class("e2c")
    with pytest.raises(ConfigurationError, match="not a subclass"):
        sandbox_class("pathlib:Path")
    with pytest.raises(InvalidRequest, match="no_such_module"):
        sandbox_class("no_such_module:Sandbox")


async def test_a_call_is_repeated_after_an_error_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    create, execute = FolderSandbox.create, FolderSandbox.execute

    def busy_create(self: FolderSandbox, labels: Mapping[str, str]) -> None:
        calls.append("create")
        if calls.count("create") == 1:
            raise Busy("429")
        create(self, labels)

    def lost_answer(self: FolderSandbox, script: str, env: Mapping[str, str]) -> tuple[int, str]:
        """Each script runs, but the first answer is lost."""
        told = execute(self, script, env)
        if script not in calls:
            calls.append(script)
            raise Busy("the connection was lost")
        return told

    monkeypatch.setattr(FolderSandbox, "create", busy_create)
    monkeypatch.setattr(FolderSandbox, "execute", lost_answer)
    sandbox = FolderSandbox({"max_concurrent": 1})
    await sandbox.start()
    assert calls.count("create") == 2
    assert (await sandbox.run("echo once >>count; cat count")).output == "once\n"
    await sandbox.stop()


async def test_processes_are_killed_where_grep_reads_only_lines(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path_factory.mktemp("bin") / "grep"
    program.write_text(f'#!/bin/sh\ncase $1 in -*z*) exit 2;; esac\nexec {shutil.which("grep")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    sandbox = FolderSandbox({"max_concurrent": 1})
    await sandbox.start()
    await sandbox.run("setsid sleep 1000 >/dev/null 2>&1 & echo $! >left")
    await sandbox.kill_all()
    told = await sandbox.run("kill -0 $(cat left) 2>/dev/null && ! grep -q Z /proc/$(cat left)/stat")
    assert told.exit_code != 0
    await sandbox.stop()


async def test_a_provider_that_fails_is_told_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FolderSandbox, labels: Mapping[str, str]) -> None:
        raise PermissionError("the key is wrong")

    with monkeypatch.context() as patched:
        patched.setattr(FolderSandbox, "create", fail)
        with pytest.raises(SandboxLost, match="cannot start a sandbox of folder: PermissionError: the key is wrong"):
            await FolderSandbox({"max_concurrent": 1}).start()
    sandbox = FolderSandbox({"max_concurrent": 1})
    await sandbox.start()
    await sandbox.stop()


async def test_a_sandbox_whose_start_is_cancelled_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    create = FolderSandbox.create

    def slow(self: FolderSandbox, labels: Mapping[str, str]) -> None:
        begun.set()
        go.wait(60)
        create(self, labels)

    monkeypatch.setattr(FolderSandbox, "create", slow)
    sandbox = FolderSandbox({"max_concurrent": 1})
    starting = asyncio.create_task(sandbox.start())
    await asyncio.to_thread(begun.wait, 60)
    starting.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert made() == []


async def test_a_command_whose_sandbox_is_gone_fails_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = FolderSandbox({"max_concurrent": 1})
    await sandbox.start()
    process = await sandbox.launch("exec sleep 1000")

    def gone(self: FolderSandbox, script: str, env: Mapping[str, str]) -> tuple[int, str]:
        raise LookupError("there is no such sandbox")

    with monkeypatch.context() as patched:
        patched.setattr(FolderSandbox, "execute", gone)
        sandbox.delete()  # ends the request that waits
        with pytest.raises((SandboxLost, RuntimeError)):
            await process.wait()
    await sandbox.stop()


def owner() -> subprocess.Popen[bytes]:
    """A process that owns three sandboxes."""
    program = subprocess.Popen([sys.executable, "-c", OWNER_PROGRAM], stdout=subprocess.PIPE, start_new_session=True)
    assert program.stdout is not None
    assert program.stdout.readline() == b"ready\n"
    return program


async def test_nothing_is_left_when_the_process_that_owns_sandboxes_is_killed() -> None:
    program = await asyncio.to_thread(owner)
    assert len(made()) == 3
    own = FolderSandbox({"max_concurrent": 1})
    await own.start()
    os.killpg(program.pid, signal.SIGKILL)
    program.communicate()
    await until(lambda: len(made()) == 1)
    assert (await own.run("echo lives")).output == "lives\n"
    await own.stop()


def test_the_cleaner_looks_again_for_what_was_being_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_cleaning, "_AGAIN_S", (0,) * 5)
    found = iter([1, 0, 1, 0, 0, 9])
    remote_cleaning.clean(lambda: next(found))
    assert list(found) == [9]
