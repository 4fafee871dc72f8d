"""Fixtures: tiny models of one shape with different weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from proxy.engine.tiny.model import build_tiny_model

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
