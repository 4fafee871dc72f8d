"""Daytona's SDK against a stand-in of its service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.sandboxes.daytona_service import KEY, application
from tests.conformance.sandboxes.machines import Machines, served
from tests.conformance.sandboxes.provider import Place, ProviderContract
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.sandboxes.by_name import sandbox_class

pytestmark = pytest.mark.clients


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    machines = Machines(tmp_path)
    with served(application(machines)) as url:
        monkeypatch.setenv("DAYTONA_API_KEY", KEY)
        monkeypatch.setenv("DAYTONA_API_URL", f"{url}/api")
        yield Place(
            "daytona",
            machines,
            {},
            lifetime=lambda asked: 60 * float(asked["ttlMinutes"]),
            labels=lambda asked: dict(asked["labels"]),
            text=json.dumps({"max_concurrent": 4}),
        )


class TestDaytona(ProviderContract):
    async def test_an_image_has_resources_and_never_stops_for_want_of_requests(self, place: Place) -> None:
        sandbox = place.sandbox(image="python:3.12", cpu=2, memory_gib=4)
        await sandbox.start()
        (asked,) = place.machines.asked
        assert (asked["cpu"], asked["memory"], asked["autoStopInterval"], asked["autoDeleteInterval"]) == (2, 4, 0, 0)
        assert "FROM python:3.12" in asked["buildInfo"]["dockerfileContent"]
        assert sandbox.address(8000) == "https://8000-t.example"
        await sandbox.stop()


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"image": "a", "snapshot": "b"}, "image or snapshot"), ({"cpu": 2}, "cpu needs image")],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAYTONA_API_KEY", KEY)
    with pytest.raises(ConfigurationError, match=told):
        sandbox_class("daytona")({"max_concurrent": 1, **settings})


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="DAYTONA_API_KEY"):
        sandbox_class("daytona")({"max_concurrent": 1})
