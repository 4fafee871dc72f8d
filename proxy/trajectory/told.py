"""What a trainer told of sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxy.types import Sampler, VersionRuns

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Output:
    """What was sampled in a turn of N tokens: `logprobs` [N], None if they are unknown; the rest as in Interaction.

    `start`: the position of its first token in the turn's whole sequence.
    """

    session_id: str
    interaction_id: str
    start: int
    tokens: int
    logprobs: Floats | None
    versions: VersionRuns
    samplers: tuple[tuple[int, Sampler], ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What a trainer told of turns in a step. `turns`: of each output, its streams and the values of samples that end
    with it, by name; float32 [N] with NaN for missing values, and single float64 values.
    """

    trainer: str
    step: int
    turns: Sequence[tuple[Output, Mapping[str, Floats], Mapping[str, float]]]

    @property
    def session_ids(self) -> set[str]:
        return {output.session_id for output, _, _ in self.turns}
