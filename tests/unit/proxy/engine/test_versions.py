"""Runs of versions are equivalent to a list with one version per token."""

from __future__ import annotations

import itertools
import random

import pytest

from proxy.engine.versions import corrected, divided, joined, with_run
from proxy.types import VersionRuns
from tokengrove.errors import EngineFailed


def runs_of(versions: list[int]) -> VersionRuns:
    return tuple((len(list(group)), version) for version, group in itertools.groupby(versions))


def test_run_operations_equal_list_operations() -> None:
    rng = random.Random(3)
    for _ in range(500):
        versions, more = (rng.choices(range(3), k=rng.randint(0, 12)) for _ in range(2))
        assert joined(runs_of(versions), runs_of(more)) == runs_of(versions + more)
        assert with_run(runs_of(versions), len(more), 2) == runs_of(versions + [2] * len(more))
        at = rng.randint(0, len(versions))
        assert divided(runs_of(versions), at) == (runs_of(versions[:at]), runs_of(versions[at:]))
        last = rng.choices(range(3), k=rng.randint(0, len(versions)))
        assert corrected(runs_of(versions), runs_of(last)) == runs_of(versions[: len(versions) - len(last)] + last)


def test_a_correction_of_more_tokens_than_were_sent_fails() -> None:
    with pytest.raises(EngineFailed, match="the versions of 4 tokens but had sent 3"):
        corrected(((3, 0),), ((4, 1),))
