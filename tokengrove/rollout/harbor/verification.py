"""Runs a task's tests where the agent worked, or in a separate environment, and reads the rewards that they wrote.

The tests are copied only now, and files that the agent put in the place of the tests or their reward are removed.
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

    `output`: the folder for the content of /logs/verifier; None: it is not kept. Raises RewardFailed if the tests time
    out or give no reward.
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
        shutil.rmtree(folder, ignore_errors=True)  # an earlier trial with this name may have left a reward
        try:
            await sandbox.get(VERIFIER_LOGS, folder)
        except (FileNotFoundError, ValueError) as error:
            raise RewardFailed(f"the output of the tests cannot be read: {error}") from None
        if told.timed_out:
            raise RewardFailed(f"the tests have not ended within {limit_s:g} s{_end(folder)}")
        return _read(folder, told.exit_code)


def _read(folder: Path, exit_code: int) -> dict[str, float]:
    try:
        found = read_reward(folder)
    except (ValueError, OSError) as error:
        raise RewardFailed(f"the tests wrote an invalid reward: {error}") from None
    if found is None:
        files = " nor ".join(shlex.quote(f"{VERIFIER_LOGS}/{name}") for name in (TEXT_FILE, JSON_FILE))
        raise RewardFailed(f"the tests, which exited with {exit_code}, wrote neither {files}{_end(folder)}")
    return found


def _end(folder: Path) -> str:
    """The end of the tests' output, for a message."""
    file = folder / STDOUT
    text = file.read_bytes()[-4 * _SHOWN :].decode(errors="replace")[-_SHOWN:].strip() if file.is_file() else ""
    return f": {text}" if text else ""
