"""The task of docs/harbor.md: its blocks run where the machine allows rooms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks_of
from tests.unit.tokengrove.rollout.harbor_rooms import rooms
from tokengrove.commands.harbor import harbor

__all__ = ["rooms"]
PAGE = ROOT / "docs" / "harbor.md"


@pytest.mark.usefixtures("rooms")
def test_the_task_of_the_page_gives_its_solution_the_reward_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = blocks_of(PAGE)
    for block in found:
        if block.directive == "file":
            file = tmp_path / block.argument
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
    harbor(tmp_path / "tasks")
    shown = next(block.text for block in found if block.text.startswith("ok     greeting"))
    assert re.sub(r"\(.*? s\)", "(s)", capsys.readouterr().out) == re.sub(r"\(.*? s\)", "(s)", shown)
