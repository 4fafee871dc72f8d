"""Modal's SDK against a stand-in of its service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.sandboxes.machines import Machines
from tests.conformance.sandboxes.modal_service import KEY, NEVER_ANSWERS, served
from tests.conformance.sandboxes.provider import Place, ProviderContract
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.sandboxes.by_name import sandbox_class
from tokengrove.rollout.sandboxes.remote_sandbox import SandboxLost

pytestmark = pytest.mark.clients


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    import modal

    machines = Machines(tmp_path)
    with served(machines) as url:
        variables = {"MODAL_SERVER_URL": url, "MODAL_TOKEN_ID": KEY[0], "MODAL_TOKEN_SECRET": KEY[1]}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield Place(
            "modal",
            machines,
            {},
            lifetime=lambda asked: float(asked["timeout"]),
            labels=lambda asked: dict(asked["labels"]),
            text=json.dumps({"max_concurrent": 4}),
        )
        modal.Client.from_env().close()  # the SDK has one client per process, of this server


class TestModal(ProviderContract):
    async def test_an_image_has_limits_and_no_entrypoint(self, place: Place) -> None:
        sandbox = place.sandbox(image="debian:13", cpu=0.5, memory_gib=1.5, app="oaks")
        await sandbox.start()
        (asked,) = place.machines.asked
        assert asked["image"] == ["FROM debian:13", "ENTRYPOINT []"]
        limits = asked["resources"]
        assert (limits.milli_cpu, limits.milli_cpu_max) == (500, 500)
        assert (limits.memory_mb, limits.memory_mb_max) == (1536, 1536)
        assert asked["app"] == "oaks"
        await sandbox.stop()

    async def test_a_published_image_is_found_by_its_name(self, place: Place) -> None:
        sandbox = place.sandbox(published_image="agents:2")
        await sandbox.start()
        assert place.machines.asked[0]["image"] == ["agents:2"]
        await sandbox.stop()

    async def test_a_repeated_creation_finds_the_first_sandbox(self, place: Place) -> None:
        sandbox = place.sandbox()
        await sandbox.start()
        await asyncio.to_thread(sandbox.create, {})
        assert (await sandbox.run("echo works")).output == "works\n"
        assert len(place.machines.asked) == 1
        await sandbox.stop()

    async def test_a_sandbox_that_does_not_start_in_time_is_deleted(self, place: Place) -> None:
        sandbox = place.sandbox(image=NEVER_ANSWERS, startup_timeout=0.5)
        with pytest.raises(SandboxLost, match=r"has not started within 0.5 s"):
            await sandbox.start()
        assert (len(place.machines.asked), place.machines.running) == (1, {})

    async def test_a_command_that_does_not_end_in_time_is_an_error_that_passes(self, place: Place) -> None:
        sandbox = place.sandbox()
        await sandbox.start()
        with pytest.raises(Exception, match="has not ended within 1 s") as told:
            await asyncio.to_thread(sandbox.shell, "sleep 1000", b"", 1)
        assert sandbox.is_transient(told.value)
        await sandbox.stop()

    async def test_an_upload_that_fails_tells_why(self, place: Place) -> None:
        sandbox = place.sandbox()
        await sandbox.start()
        with pytest.raises(SandboxLost, match=r"mkdir: .*/proc/oak"):
            await sandbox.upload("/proc/oak/leaf", bytes(4 * 2**20))
        await sandbox.stop()


def test_two_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODAL_TOKEN_ID", KEY[0])
    with pytest.raises(ConfigurationError, match="image or published_image"):
        sandbox_class("modal")({"max_concurrent": 1, "image": "a", "published_image": "b"})


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODAL_TOKEN_ID", raising=False)
    with pytest.raises(ConfigurationError, match="MODAL_TOKEN_ID"):
        sandbox_class("modal")({"max_concurrent": 1})
    monkeypatch.setenv("MODAL_IS_REMOTE", "1")
    sandbox_class("modal")({"max_concurrent": 1})  # a container of Modal has credentials of its own
