"""The command line. Forked processes do not import this module, as they would one that has another name."""

from __future__ import annotations

import sys

from tests.torture import processes
from tests.torture.command import play
from tests.torture.processes.runs import SCENARIOS, run

if __name__ == "__main__":
    sys.exit(play("tests.torture.processes", processes.__doc__, SCENARIOS, run))
