"""Fixtures: tiny models of one shape with different weights, and the real SGLang if it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from proxy.engine.sglang.engine import SglangEngine
from proxy.engine.tiny.model import build_tiny_model
from proxy.settings import Settings
from tests.engines.devices import CPU_ARGUMENTS

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore SGLang's warnings; those of its shutdown would fail whichever test runs last."""
    if importlib.util.find_spec("sglang") is not None:
        for item in items:
            if item.path.parent == _HERE:
                item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with different weights of one model, by the version that tests give them."""
    folders = {version: tmp_path_factory.mktemp(f"weights-{version}") for version in range(3)}
    for version, folder in folders.items():
        build_tiny_model(folder, seed=version)
    return folders


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang_engine(weights: dict[int, Path]) -> AsyncIterator[SglangEngine]:
    """One in-process SGLang for the session: it takes half a minute to start, and 2 GB."""
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    engine = SglangEngine(Settings(engine_arg=CPU_ARGUMENTS), weights[0])
    await engine.start()
    yield engine
    await engine.close()
