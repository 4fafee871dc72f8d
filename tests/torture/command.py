"""The options of both tiers, and the loop over seeds."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `failure`: what was wrong, with the stacks of what had not ended; empty if nothing was.

    `steps`, `order`: how many events were run, and a digest of their order; 0 and "" where nothing chooses that.
    """

    name: str
    seed: int
    failure: str
    steps: int = 0
    order: str = ""


def play(module: str, about: str | None, names: Iterable[str], run: Callable[[str, int], Outcome]) -> int:
    """Run scenarios over the seeds that the command line asks for; return 1 at the first failure."""
    options = _options(module, about, names)
    began, runs = time.monotonic(), Counter[str]()
    for seed in count(options.seed) if options.minutes else range(options.seed, options.seed + options.seeds):
        for name in options.scenario or names:
            if (outcome := run(name, seed)).failure:
                return _failed(module, outcome)
            runs[name] += 1
        if options.minutes and time.monotonic() - began >= 60.0 * options.minutes:
            break
    for name, times in runs.items():
        print(f"{name}: {times} seeds passed")
    print(f"{runs.total()} runs in {time.monotonic() - began:.0f} s")
    return 0


def _failed(module: str, outcome: Outcome) -> int:
    after = f", after {outcome.steps} steps (order {outcome.order})" if outcome.order else ""
    print(f"FAILED: scenario {outcome.name}, seed {outcome.seed}{after}")
    print(outcome.failure)
    print(f"Again: python -m {module} --scenario {outcome.name} --seed {outcome.seed}")
    return 1


def _options(module: str, about: str | None, names: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (1)")
    parser.add_argument("--minutes", type=float, default=0.0, help="run new seeds for so long, in place of --seeds")
    parser.add_argument(
        "--scenario", action="append", choices=sorted(names), help="only this one; may be given again (all)"
    )
    return parser.parse_args()
