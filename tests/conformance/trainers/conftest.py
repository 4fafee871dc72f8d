"""One server per module, so that its queue holds only the sessions that the module played."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.e2e.processes import server_process

if TYPE_CHECKING:
    from tokengrove.client import Export

# The trainers have a separate environment; those of other clients lack the packages of the project's own client.
collect_ignore_glob = [] if all(map(find_spec, ("httpx", "numpy", "orjson"))) else ["test_*.py"]
os.environ.update({"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"})


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--engine", "scripted", "--engine-arg", "tokens=8"]
    with server_process(tmp_path_factory.mktemp("trainers"), *flags) as process:
        yield process.url.rstrip("/")


@pytest.fixture(scope="module")
def export(url: str) -> Export:
    """Run two groups of four sessions, and export them as chains."""
    from tests.conformance.trainers.played import GROUPS, TRIES, play
    from tokengrove.client import Client

    for group in GROUPS:
        for number in range(TRIES):
            play(url, group, number)
    with Client(url) as client:
        return client.export(filter={"status": "ended"}, layout="concat")
