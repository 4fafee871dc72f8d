"""The command line: `python -m tests.torture --seed N --minutes M [--scenario S]`."""

from __future__ import annotations

import os
import sys

from tests.torture import scenarios  # noqa: F401
from tests.torture.command import play
from tests.torture.runs import SCENARIOS, run

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order in sets of strings would differ from run to run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.torture", *sys.argv[1:]])
    sys.exit(play("tests.torture", __doc__, SCENARIOS, run))
