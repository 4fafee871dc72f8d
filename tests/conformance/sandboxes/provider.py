"""The tests of a provider's class against a stand-in of its service. Subclasses have the fixture `place`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.conformance.sandboxes.machines import Machines
from tests.sandbox_contract import SandboxContract
from tokengrove.rollout.sandboxes import Sandbox, remote_sandbox
from tokengrove.rollout.sandboxes.by_name import sandbox_class
from tokengrove.rollout.sandboxes.remote_sandbox import OWNER, SandboxLost

OWNER_PROGRAM = """
import asyncio, json, sys
from tokengrove.rollout.sandboxes.by_name import sandbox_class

async def main():
    for _ in range(2):
        sandbox = sandbox_class(sys.argv[1])(json.loads(sys.argv[2]))
        await sandbox.start()
        await sandbox.launch("exec sleep 1000")
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@dataclass
class Place:
    """A provider and its stand-in. `refuse`: makes its key wrong. `labels`: of what was created."""

    name: str
    machines: Machines
    settings: dict[str, Any]
    lifetime: Callable[[dict[str, Any]], float]
    """The seconds after which the service would delete what was created so."""
    labels: Callable[[dict[str, Any]], dict[str, str]]
    text: str

    def sandbox(self, **more: Any) -> Any:
        return sandbox_class(self.name)({"max_concurrent": 4, **self.settings, **more})


def _owner(place: Place) -> subprocess.Popen[bytes]:
    """A process that owns two sandboxes."""
    words = [sys.executable, "-c", OWNER_PROGRAM, place.name, place.text]
    program = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert program.stdout is not None
    assert program.stdout.readline() == b"ready\n"
    return program


class ProviderContract(SandboxContract):
    """What each provider's class does, in addition to what every sandbox does."""

    @pytest.fixture
    async def sandbox(self, place: Place) -> AsyncIterator[Sandbox]:
        sandbox = place.sandbox()
        await sandbox.start()
        yield sandbox
        await sandbox.stop()
        assert place.machines.running == {}

    async def test_the_service_knows_the_owner_and_the_lifetime(self, place: Place) -> None:
        sandbox = place.sandbox(max_lifetime_s=600)
        await sandbox.start()
        (asked,) = place.machines.asked
        assert place.lifetime(asked) == 600
        assert len(place.labels(asked)[OWNER]) == 32
        await sandbox.stop()

    async def test_a_service_that_is_busy_is_asked_again(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote_sandbox, "_PAUSES_S", (0.0,) * 3)
        place.machines.busy = 2
        sandbox = place.sandbox()
        await sandbox.start()
        assert (await sandbox.run("echo works")).output == "works\n"
        await sandbox.stop()
        assert (place.machines.busy, len(place.machines.asked)) == (0, 1)

    async def test_a_sandbox_that_the_service_has_deleted_is_lost(
        self, place: Place, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote_sandbox, "_PAUSES_S", ())
        sandbox = place.sandbox()
        await sandbox.start()
        place.machines.delete(next(iter(place.machines.running)))
        with pytest.raises(SandboxLost, match=f"of {sandbox.extra}"):
            await sandbox.run("true")
        await sandbox.stop()

    async def test_nothing_is_left_after_a_kill(self, place: Place) -> None:
        program = await asyncio.to_thread(_owner, place)
        other = place.sandbox()
        await other.start()
        assert len(place.machines.running) == 3
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        while len(place.machines.running) > 1:
            assert (await other.run("sleep 0.1")).exit_code == 0  # the sandbox of another process lives
        await other.stop()
        assert place.machines.running == {}
