"""Why a sampled token is not trained in an export, and why a whole session is left out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from proxy.reasons import Explained


class Untrained(Explained):
    """Why a sampled token is trained in no sample.

    A token has one reason: of the first five, the one nearest to training (the last that holds); of the others, which
    hold for every sample, the first in this order.
    """

    DRIFT = "drift", "stands in no sample as sampled (`drift: mask`)"
    UNREWARDED = "unrewarded", "is in a session or path that is left out (`unrewarded: skip`)"
    TOO_LONG = "too_long", "is in samples that do not fit and were dropped (`on_too_long: drop`)"
    CUT = "cut", "was cut off by layout `padded` (`on_too_long: truncate`)"
    STALE = "stale", "is outside `min_version` or `max_version_span`"
    FILTER = "filter", "belongs to a turn that `filter` (`purpose`, `agent`) leaves out"
    NO_LOGPROBS = "no_logprobs", "came from the engine without a logprob"
    UNFINISHED = "unfinished", "belongs to a session that ended with `finished: false` (`mask_unfinished`)"
    TRAIN = "train", "belongs to a turn that `train` leaves out"
    MARK = "mark", "was marked with `trainable: false`, or is outside the marked `spans`"
    GRAMMAR = "grammar", "was sampled under a grammar, and `train.constrained` is false"
    PLACEHOLDER = "placeholder", "stands for an image, and no image is there: an engine must not sample it"


class LeftOut(Explained):
    """Why a session is left out of an export: the first three by `unrewarded: skip`, the last by the filter."""

    ACTIVE = "active", "still runs, so its score is not final"
    FAILED = "failed", "ended with the outcome `Failed`, so its score is not final"
    UNREWARDED = "unrewarded", "has no reward of the kind that counts"
    VALIDATION = "validation", "has `validate: true` in its metadata, and was neither named nor asked for"


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
