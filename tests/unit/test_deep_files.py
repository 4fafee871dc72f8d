"""Files that are nested deeper than their parsers recurse are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.errors import ConfigurationError, InvalidRequest
from proxy.rollout.harbor import task_folder
from proxy.rollout.kinds import verl_loop
from proxy.rollout.verl.registry import register_file
from proxy.rollout.verl.tools.registry import _entries
from proxy.settings.config_file import read_config_file

DEEP = "[" * 1_500


@pytest.mark.parametrize(
    ("name", "text", "read", "error"),
    [
        ("tokengrove.toml", f"port = {DEEP}", lambda file: read_config_file(file), ConfigurationError),
        ("task.toml", f"version = {DEEP}", lambda file: task_folder._config(file.parent), task_folder.BadTask),
        ("config.yaml", DEEP, lambda file: verl_loop._of_file(str(file)), InvalidRequest),
        ("loops.yaml", DEEP, lambda file: register_file(file), InvalidRequest),
        ("tools.yaml", DEEP, lambda file: _entries(str(file)), InvalidRequest),
    ],
)
def test_a_file_of_any_depth_is_refused_by_name(
    tmp_path: Path, name: str, text: str, read: Callable[[Path], Any], error: type[Exception]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(error, match=f"{name}.* is nested too deeply"):
        read(file)
