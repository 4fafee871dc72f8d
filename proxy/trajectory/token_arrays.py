"""Token arrays of a sample, all of one length L.

Only a sampled token that is trained has loss mask 1, its logprob and its weight version. Every other token is context:
mask 0, logprob 0, version -1, turn -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from proxy.types import Ids, Interaction
from tokengrove.reasons import LogprobsOf, Unrecomputable

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """An interaction in a sample; `turn` counts from 0.

    `start`: where its output begins in the tokens of its path; None: the path does not contain it. `kept`: the part
    [first, end) of the output that the sample contains; None: nothing. `trained`: the tokens of the output that the
    sample trains, bool [output]; None: nothing. `context`: how the tokens before the output differ from its prompt;
    None: they are equal. `masks`: the sample has the kept set of each token of the output.
    """

    interaction: Interaction
    turn: int
    start: int | None
    kept: Span | None
    trained: BoolArray | None = None
    context: Unrecomputable | None = None
    masks: bool = False

    @property
    def span(self) -> Span | None:
        """The range [start, end) of the kept output in the tokens of the path; None: nothing is kept."""
        if self.start is None or self.kept is None:
            return None
        return (self.start + self.kept[0], self.start + self.kept[1])

    @property
    def in_sample(self) -> BoolArray:
        """Which sampled tokens the sample contains as sampled, bool [output]."""
        has = np.zeros(len(self.interaction.output_ids), bool)
        has[slice(*(self.kept or (0, 0)))] = True
        return has

    @property
    def trains(self) -> bool:
        """Whether the sample trains any token of the output."""
        return self.trained is not None and bool(self.trained.any())

    @property
    def missing(self) -> int:
        """The number of sampled tokens that the sample does not contain as sampled."""
        first, end = self.kept or (0, 0)
        return len(self.interaction.output_ids) - (end - first)

    @property
    def recomputable(self) -> Unrecomputable | None:
        """Why the logprobs of the output cannot be recomputed from the sample; None if they can."""
        return first_reason((self.context, *why_sampled_so(self.interaction, masks=self.masks)))


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """`input_ids`, `loss_mask`, `versions`, `turn_ids` int32 [L]; `logprobs` float32 [L].

    `unmasked` float32 [L]: the logprobs, but for answers under a grammar the logprobs before the grammar's mask; None
    if no trained answer has them.
    """

    input_ids: IntArray
    loss_mask: IntArray
    logprobs: FloatArray
    versions: IntArray
    turn_ids: IntArray
    unmasked: FloatArray | None = None


def fill(ids: Ids, placements: Sequence[Placement]) -> TokenArrays:
    """Fill the arrays of a sample. Only the tokens in `Placement.trained` are trained."""
    length = len(ids)
    arrays = TokenArrays(
        input_ids=np.array(ids, np.int32),
        loss_mask=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        turn_ids=np.full(length, -1, np.int32),
    )
    for placement in placements:
        if placement.trained is not None and placement.start is not None:
            _fill_trained(arrays, placement.interaction, placement.turn, placement.start, placement.trained)
    return replace(arrays, unmasked=_unmasked(arrays.logprobs, placements))


def _unmasked(logprobs: FloatArray, placements: Sequence[Placement]) -> FloatArray | None:
    unmasked: FloatArray | None = None
    for placement in placements:
        start, trained, told = placement.start, placement.trained, placement.interaction.unmasked_logprobs
        if told is not None and start is not None and trained is not None and placement.trains:
            unmasked = logprobs.copy() if unmasked is None else unmasked
            unmasked[start : start + len(trained)] = np.where(trained, np.asarray(told), 0.0)
    return unmasked


def _fill_trained(arrays: TokenArrays, interaction: Interaction, turn: int, start: int, trained: BoolArray) -> None:
    end = start + len(trained)
    arrays.loss_mask[start:end] = trained
    arrays.logprobs[start:end] = np.where(trained, np.asarray(interaction.logprobs), 0.0)
    arrays.versions[start:end] = np.where(trained, token_versions(interaction), -1)
    arrays.turn_ids[start:end] = np.where(trained, turn, -1)


def token_versions(interaction: Interaction) -> IntArray:
    """The weight version of each output token, int32 [len(output_ids)]."""
    counts = [count for count, _ in interaction.versions]
    return np.repeat(np.array([version for _, version in interaction.versions], np.int32), counts)


def why_sampled_so(interaction: Interaction, *, masks: bool = False) -> Iterable[Unrecomputable]:
    """All reasons that follow from how an answer was sampled. `masks`: the kept set of each token is known."""
    sampling = interaction.sampling
    if interaction.grammar and not masks:
        yield Unrecomputable.GRAMMAR
    if interaction.logprobs_of is LogprobsOf.MODEL:
        yield Unrecomputable.MODEL
        return  # the other parameters did not shape these logprobs
    if sampling.logit_bias or sampling.min_tokens:
        yield Unrecomputable.BIAS
    if (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0):
        yield Unrecomputable.PENALTIES
    if masks:
        return
    if interaction.logprobs_of is not LogprobsOf.RULE:
        yield Unrecomputable.SAMPLED
    elif sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0:
        yield Unrecomputable.TRUNCATED


def first_reason(reasons: Iterable[Unrecomputable | None]) -> Unrecomputable | None:
    """The first reason in the order of `Unrecomputable`; None if there is none."""
    given = set(reasons)
    return next((reason for reason in Unrecomputable if reason in given), None)
