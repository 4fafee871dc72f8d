"""What an export has of one session: its rows, and counts of what is not in them.

The counts are those of the ledger, so the trained tokens and the untrained ones add up to the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.ledger import Ledger
from proxy.trajectory.sample_row import Labels, SampleRow
from tokengrove.options.export import Layout
from tokengrove.reasons import Untrained


@dataclass(frozen=True, slots=True)
class SessionSamples:
    """The rows of a session, and what is not in them.

    `ledger`: what becomes of each sampled token. `masked_tokens`: sampled tokens of the rows' turns that no row
    contains as sampled. `dropped`: samples longer than the padded lengths. `stale`: samples outside the limits on
    weight versions; in layout tree, turns. `unrewarded`: samples of paths without a reward. `entry`: what the
    session's entry in the export says about its score. `warnings`: what is said about how it is scored and compared.
    """

    rows: Sequence[SampleRow]
    ledger: Ledger
    masked_tokens: int = 0
    dropped: int = 0
    stale: int = 0
    unrewarded: int = 0
    entry: Labels = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def counts(self, options: LayoutOptions) -> Labels:
        """What the session's entry says of its rows: tokens that are trained, those that are not, and why."""
        sampled, untrained = self.ledger.sampled(), self.ledger.untrained()
        counts: Labels = {
            "sampled_tokens": sampled,
            "trained_tokens": self.ledger.trained(),
            "untrained_tokens": untrained,
            "warnings": [*warnings(sampled, untrained), *self.warnings],
            "masked_tokens": self.masked_tokens,
        }
        if options.padding is not None:
            counts["dropped_samples"] = self.dropped
        if options.freshness.is_asked:
            counts["stale_turns" if options.layout is Layout.TREE else "stale_samples"] = self.stale
        if options.outline:
            counts["output_runs"] = {name: self.ledger.runs(name) for name in self.ledger.states}
        if self.unrewarded:
            counts["unrewarded_samples"] = self.unrewarded
        return counts


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
