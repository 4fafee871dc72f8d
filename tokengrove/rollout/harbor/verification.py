"""Runs a task's tests where the agent worked, or in an environment of their own, and reads the rewards they wrote.

The tests come there only now, and nothing that the agent put in their place, or in that of their reward, stays.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path

from tokengrove.rollout.command.reward_file import JSON_FILE, TEXT_FILE, read_reward
from tokengrove.rollout.episodes import RewardFailed
from tokengrove.rollout.harbor.harbor_sandbox import TESTS, VERIFIER_LOGS, HarborSandbox
from tokengrove.rollout.harbor.task_folder import Stage
from tokengrove.rollout.harbor.variables import resolved

STDOUT = "test-stdout.txt"
_SHOWN = 500


async def rewards(
    stage: Stage, sandbox: HarborSandbox, *, upload: bool, limit_s: float, output: Path | None
) -> dict[str, float]:
    """Run `test.sh` and return the rewards by name. `upload`: the tests are not in the environment yet.

    `output` gets what is in /logs/verifier then. Raises RewardFailed if they give none.
    """
    await sandbox.empty(VERIFIER_LOGS)
    if upload:
        await sandbox.empty(TESTS)
        for folder in stage.tests:
            await sandbox.put([(folder, TESTS)])
    script, log = f"{TESTS}/test.sh", f"{VERIFIER_LOGS}/{STDOUT}"
    env = resolved(stage.verifier_env, "verifier")
    told = await sandbox.run(f"chmod +x {script}; ({script}) > {log} 2>&1", env, limit_s)
    with tempfile.TemporaryDirectory(prefix="tokengrove-verifier-") as scratch:
        folder = output or Path(scratch)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier trial of this name may have left its reward there
        try:
            await sandbox.get(VERIFIER_LOGS, folder)
        except (FileNotFoundError, ValueError) as error:
            raise RewardFailed(f"what the tests wrote cannot be read: {error}") from None
        if told.timed_out:
            raise RewardFailed(f"the tests have not ended within {limit_s:g} s{_end(folder)}")
        return _read(folder, told.exit_code)


def _read(folder: Path, exit_code: int) -> dict[str, float]:
    try:
        found = read_reward(folder)
    except (ValueError, OSError) as error:
        raise RewardFailed(f"the tests wrote no reward but something else: {error}") from None
    if found is None:
        files = " nor ".join(shlex.quote(f"{VERIFIER_LOGS}/{name}") for name in (TEXT_FILE, JSON_FILE))
        raise RewardFailed(f"the tests, which exited with {exit_code}, wrote neither {files}{_end(folder)}")
    return found


def _end(folder: Path) -> str:
    """The end of what the tests have written, for a reason."""
    file = folder / STDOUT
    text = file.read_bytes()[-4 * _SHOWN :].decode(errors="replace")[-_SHOWN:].strip() if file.is_file() else ""
    return f": {text}" if text else ""
