"""Which samples are fresh enough to be trained, by the weight versions that sampled what they train.

Context does not count: a sample may stand on tokens of any age. One that trains nothing is never stale.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.trajectory.tensors import TokenArrays


@dataclass(frozen=True, slots=True)
class Freshness:
    """`min_version`: no trained token is older. `max_version_span`: newest minus oldest of them. None: any."""

    min_version: int | None = None
    max_version_span: int | None = None

    @property
    def is_asked(self) -> bool:
        return self.min_version is not None or self.max_version_span is not None

    def lets(self, arrays: TokenArrays) -> bool:
        """Whether a sample with these arrays is fresh enough."""
        versions = arrays.versions[arrays.loss_mask == 1] if self.is_asked else arrays.versions[:0]
        if not len(versions):
            return True
        oldest, newest = int(versions.min()), int(versions.max())
        if self.min_version is not None and oldest < self.min_version:
            return False
        return self.max_version_span is None or newest - oldest <= self.max_version_span


ANY_VERSION = Freshness()
