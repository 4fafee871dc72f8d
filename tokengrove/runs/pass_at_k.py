"""pass@k: an unbiased estimate of the probability that at least one of k samples of a task passes.

The formula is from Chen et al., "Evaluating Large Language Models Trained on Code" (2021, arXiv:2107.03374, equation
1): 1 - C(n - c, k) / C(n, k) for a task with n samples, of which c passed, and its mean over the tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The estimate for one task. Raises ValueError unless 0 <= passed <= samples and 1 <= k <= samples."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples and no more passed than samples: {passed} of {samples}")
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def mean_pass_at_k(tasks: Iterable[tuple[int, int]], k: int) -> float | None:
    """The mean over the tasks, each `(samples, passed)`, that have at least k samples; None without any."""
    found = [pass_at_k(samples, passed, k) for samples, passed in tasks if samples >= k]
    return sum(found) / len(found) if found else None


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4, ... up to and including `most`."""
    found = [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]
    return found if found and found[-1] == most else [*found, most]
