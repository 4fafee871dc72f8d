"""`python -m tokengrove.roll.rock.agent_process module:function`: runs a Python function as the agent of a job.

The function receives the task as a dict, and the job's `kwargs` that its signature accepts. It may be a coroutine
function. A returned number is the reward if no verifier gives one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tokengrove.rollout.agent_call import call_agent
from tokengrove.rollout.imports import load


def main(path: str) -> None:
    """Run the function at `path` once."""
    task: Any = json.loads(Path(os.environ["TASK_FILE"]).read_text())
    result = asyncio.run(call_agent(load(path), task, json.loads(os.environ["AGENT_KWARGS"])))
    if isinstance(result, int | float):
        folder = Path(os.environ["VERIFIER_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reward.txt").write_text(repr(float(result)))


if __name__ == "__main__":
    main(sys.argv[1])
