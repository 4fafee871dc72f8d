"""`tokengrove/rollout/contract.py` is one file that can be copied, with the names and signatures of the contract."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokengrove.rollout import contract

FILE = Path(contract.__file__)
PARAMETERS = {
    "GenerateAPI.generate": ["self", "rollout_id", "turn", "messages", "tools", "sampling"],
    "AgentSession.next_request": ["self"],
    "AgentSession.deliver": ["self", "intercept", "completion_text"],
    "AgentSession.verify": ["self"],
    "AgentSession.close": ["self"],
    "AgentSessionFactory.create": ["self", "task", "rollout_id"],
    "RolloutMessages": ["rollout_id", "messages", "reward"],
}


def test_the_file_alone_can_be_imported_without_anything_installed(tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path / "contract.py")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import contract; "
        "print(contract.RolloutMessages('r', [], 1.0).reward, [m for m in sys.modules if m.split('.')[0] == 'proxy'])"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "1.0 []"


@pytest.mark.parametrize("name", PARAMETERS)
def test_names_and_parameters_are_those_of_the_printed_contract(name: str) -> None:
    found = contract
    for part in name.split("."):
        found = getattr(found, part)
    assert list(inspect.signature(found).parameters) == PARAMETERS[name]


def test_a_session_is_created_with_keywords_only() -> None:
    parameters = inspect.signature(contract.AgentSessionFactory.create).parameters
    assert {parameters[name].kind for name in ("task", "rollout_id")} == {inspect.Parameter.KEYWORD_ONLY}
