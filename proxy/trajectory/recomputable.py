"""Whether a trainer can compute the logprobs of an answer again from its sample's ids and its temperature alone.

Logprobs are natural logarithms after temperature, penalties, logit_bias and grammar mask, and before top-p, top-k and
min-p. So one forward pass over the sample gives them again, unless one of the reasons below says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.types import Interaction
from tokengrove.reasons import Unrecomputable


def why_sampled_so(interaction: Interaction) -> Iterable[Unrecomputable]:
    """All reasons that lie in how an answer was sampled."""
    sampling = interaction.sampling
    if interaction.grammar:
        yield Unrecomputable.GRAMMAR
    if sampling.logit_bias or sampling.min_tokens:
        yield Unrecomputable.BIAS
    if (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0):
        yield Unrecomputable.PENALTIES
    if sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0:
        yield Unrecomputable.TRUNCATED


def first_reason(reasons: Iterable[Unrecomputable | None]) -> Unrecomputable | None:
    """The first reason in the order of `Unrecomputable`; None if there is none."""
    given = set(reasons)
    return next((reason for reason in Unrecomputable if reason in given), None)
