"""E2B's SDK against a stand-in of its service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.sandboxes.e2b_service import KEY, application
from tests.conformance.sandboxes.machines import Machines, served
from tests.conformance.sandboxes.provider import Place, ProviderContract
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.sandboxes.by_name import sandbox_class

pytestmark = pytest.mark.clients


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    machines = Machines(tmp_path)
    with served(application(machines)) as url:
        variables = {"E2B_API_KEY": KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_HTTP_VERSION": "1.1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield Place(
            "e2b",
            machines,
            {},
            lifetime=lambda asked: float(asked["timeout"]),
            labels=lambda asked: dict(asked["metadata"]),
            text=json.dumps({"max_concurrent": 4}),
        )


class TestE2B(ProviderContract):
    async def test_ports_have_addresses(self, place: Place) -> None:
        sandbox = place.sandbox()
        await sandbox.start()
        (name,) = place.machines.running
        assert sandbox.address(8000) == f"https://8000-{name}.e2b.app"
        await sandbox.stop()


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="E2B_API_KEY"):
        sandbox_class("e2b")({"max_concurrent": 1})
