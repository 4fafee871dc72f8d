"""Why a sampled token is not trained in an export, and why a whole session is left out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tokengrove.reasons import Untrained

# Reasons that no one asked for by an option of the export or a mark.
_SURPRISES = (
    *(Untrained.DRIFT, Untrained.TOO_LONG, Untrained.CUT),
    *(Untrained.NO_LOGPROBS, Untrained.GRAMMAR, Untrained.PLACEHOLDER),
)


def warnings(sampled: int, untrained: Mapping[str, int]) -> Iterator[str]:
    """A warning if over half of the sampled tokens are not trained though neither an option of the export
    nor a mark left them out."""
    lost = {reason: untrained[reason] for reason in _SURPRISES if untrained.get(reason)}
    if 2 * sum(lost.values()) > sampled:
        counts = ", ".join(f"{count} {reason}" for reason, count in lost.items())
        way_out = "; 'train.constrained': true trains those under a grammar" if Untrained.GRAMMAR in lost else ""
        yield f"{sum(lost.values())} of {sampled} sampled tokens are not trained: {counts}{way_out}"
