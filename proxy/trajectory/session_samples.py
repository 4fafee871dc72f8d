"""The samples that an export has of one session: its rows, and counts of what they leave out.

The counts come from the ledger, so trained and untrained tokens add up to the sampled tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.ledger import Ledger
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.sample_row import Labels, MadeRows, SampleRow
from proxy.types import Interaction
from tokengrove.options.export import Layout
from tokengrove.reasons import LogprobsOf, Untrained


@dataclass(frozen=True, slots=True)
class SessionSamples:
    """The rows of a session, and what they leave out.

    `ledger`: whether each sampled token is trained. `masked_tokens`: the number of sampled tokens of the rows' turns
    that no row contains as sampled. `dropped`: the number of samples longer than the padded lengths. `stale`: the
    number of samples outside the limits on weight versions (in layout tree, of turns with a token that is not trained
    because of them). `unrewarded`: the number of samples of paths without a reward. `entry`: labels of the score in the
    session's entry in the export. `warnings`: warnings about what it trains, and about how the session is scored and
    compared.
    """

    rows: Sequence[SampleRow]
    ledger: Ledger
    masked_tokens: int = 0
    dropped: int = 0
    stale: int = 0
    unrewarded: int = 0
    entry: Labels = field(default_factory=dict)
    warnings: Sequence[str] = ()

    @property
    def paths(self) -> list[PathSample]:
        """The rows that are paths: all of them in layouts individual, concat and forest."""
        return [row for row in self.rows if isinstance(row, PathSample)]

    def counts(self, options: LayoutOptions) -> Labels:
        """Counts for the session's entry in the export: tokens that are trained, tokens that are not, and why."""
        sampled, untrained = self.ledger.sampled(), self.ledger.untrained()
        counts: Labels = {
            "sampled_tokens": sampled,
            "trained_tokens": self.ledger.trained(),
            "untrained_tokens": untrained,
            "warnings": [*warnings(sampled, untrained), *self.warnings],
            "masked_tokens": self.masked_tokens,
        }
        if options.padding is not None or (options.forest is not None and options.forest.max_tokens is not None):
            counts["dropped_samples"] = self.dropped
        if options.freshness.is_asked:
            counts["stale_turns" if options.layout is Layout.TREE else "stale_samples"] = self.stale
        if options.outline:
            counts["output_runs"] = {name: self.ledger.runs(name) for name in self.ledger.states}
        if self.unrewarded:
            counts["unrewarded_samples"] = self.unrewarded
        return counts


def joined_routes(parts: Mapping[str, SessionSamples], taken: Sequence[str], empty: SessionSamples) -> SessionSamples:
    """The samples of all routes of a session as one, route after route.

    `parts`: by route. `taken`: the routes that the export selects. `empty`: the samples of the session without turns.
    The entry has the score of the first one; with several, `by_route` has all of them.
    """
    entry = parts[taken[0]].entry if taken else empty.entry
    if len(taken) > 1:
        entry = {**entry, "by_route": {name: parts[name].entry for name in taken}}
    rows = [partial(part.rows.__getitem__, at) for part in parts.values() for at in range(len(part.rows))]
    return SessionSamples(
        rows=MadeRows(rows),
        ledger=Ledger({name: state for part in parts.values() for name, state in part.ledger.states.items()}),
        masked_tokens=sum(part.masked_tokens for part in parts.values()),
        dropped=sum(part.dropped for part in parts.values()),
        stale=sum(part.stale for part in parts.values()),
        unrewarded=sum(part.unrewarded for part in parts.values()),
        entry=entry,
        warnings=tuple(dict.fromkeys(warning for name in taken for warning in parts[name].warnings)),
    )


# Reasons that follow from neither an option of the export nor a mark.
_SURPRISES = (
    *(Untrained.DRIFT, Untrained.TOO_LONG, Untrained.CUT),
    *(Untrained.NO_LOGPROBS, Untrained.GRAMMAR, Untrained.PLACEHOLDER),
)


def warnings(sampled: int, untrained: Mapping[str, int]) -> Iterator[str]:
    """A warning if more than half of the sampled tokens are not trained, though neither an option of the export nor a
    mark excludes them."""
    lost = {reason: untrained[reason] for reason in _SURPRISES if untrained.get(reason)}
    if 2 * sum(lost.values()) > sampled:
        counts = ", ".join(f"{count} {reason}" for reason, count in lost.items())
        way_out = "; 'train.constrained': true trains those under a grammar" if Untrained.GRAMMAR in lost else ""
        yield f"{sum(lost.values())} of {sampled} sampled tokens are not trained: {counts}{way_out}"


def logprob_warnings(interactions: Iterable[Interaction], ledger: Ledger) -> Iterator[str]:
    """A warning if tokens are trained whose logprobs are not by the rule (`proxy.engine.chunks`)."""
    found: Counter[str] = Counter()
    for each in interactions:
        if each.logprobs_of is not LogprobsOf.RULE:
            found[each.logprobs_of.value] += ledger.trained_of(each.id)
    if total := found.total():
        counts = ", ".join(f"{count} {word}" for word, count in found.items() if count)
        yield (
            f"{total} of {ledger.trained()} trained tokens have logprobs that are not by the rule ({counts}), so a "
            "trainer's own logprobs differ from them; 'train.logprobs': rule does not train them"
        )
