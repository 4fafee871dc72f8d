"""Staleness: filter samples by the weight versions of their trained tokens.

Context tokens of any version are allowed. A sample without trained tokens is never stale.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.trajectory.token_arrays import TokenArrays


@dataclass(frozen=True, slots=True)
class Freshness:
    """Limits on weight versions of trained tokens; None means no limit.

    `min_version`: the oldest version allowed. `max_version_span`: the largest allowed newest minus oldest version.
    """

    min_version: int | None = None
    max_version_span: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether any limit is set."""
        return self.min_version is not None or self.max_version_span is not None

    def admits(self, arrays: TokenArrays) -> bool:
        """Whether a sample with these arrays is within the limits."""
        versions = arrays.versions[arrays.loss_mask == 1] if self.is_asked else arrays.versions[:0]
        if not len(versions):
            return True
        oldest, newest = int(versions.min()), int(versions.max())
        if self.min_version is not None and oldest < self.min_version:
            return False
        return self.max_version_span is None or newest - oldest <= self.max_version_span


ANY_VERSION = Freshness()
