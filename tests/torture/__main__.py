"""The command line: `python -m tests.torture --seed N --minutes M [--scenario S]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from itertools import count

from tests.torture import scenarios  # noqa: F401
from tests.torture.runs import SCENARIOS, Outcome, run


def main() -> int:
    """Run scenarios over seeds; return 1 at the first failure."""
    options = _options()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order in sets of strings would differ from run to run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.torture", *sys.argv[1:]])
    began, runs = time.monotonic(), Counter[str]()
    for seed in count(options.seed) if options.minutes else range(options.seed, options.seed + options.seeds):
        for name in options.scenario or SCENARIOS:
            if (outcome := run(name, seed)).failure:
                return _failed(outcome)
            runs[name] += 1
        if options.minutes and time.monotonic() - began >= 60.0 * options.minutes:
            break
    for name, times in runs.items():
        print(f"{name}: {times} seeds passed")
    print(f"{runs.total()} runs in {time.monotonic() - began:.0f} s")
    return 0


def _failed(outcome: Outcome) -> int:
    print(f"FAILED: scenario {outcome.name}, seed {outcome.seed}, after {outcome.steps} steps (order {outcome.order})")
    print(outcome.failure)
    print(f"Again: python -m tests.torture --scenario {outcome.name} --seed {outcome.seed}")
    return 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (1)")
    parser.add_argument("--minutes", type=float, default=0.0, help="run new seeds for so long, in place of --seeds")
    parser.add_argument(
        "--scenario", action="append", choices=sorted(SCENARIOS), help="only this one; may be given again (all)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
