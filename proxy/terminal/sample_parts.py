"""What a sample of an export contains: for each turn its prompt and what was sampled, and how much is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from proxy.client import Sample


@dataclass(frozen=True, slots=True)
class SamplePart:
    """A stretch of a sample: `tokens` of them, `trained` of those. `turn`: its number; None if it is unknown."""

    turn: int | None
    sampled: bool
    tokens: int
    trained: int


def parts_of(sample: Sample, numbers: Mapping[str, int | None]) -> Iterator[SamplePart]:
    """The stretches of a sample in order. `numbers`: of the session's turns, by interaction id.

    A turn whose output does not stand in the sample as it was sampled has no stretch of its own.
    """
    at = 0
    for turn in sample.turns:
        if turn["span"] is None:
            continue
        begin, end = turn["span"]
        number = numbers.get(turn["interaction_id"])
        if begin > at:
            yield SamplePart(number, False, begin - at, int(sample.loss_mask[at:begin].sum()))
        if end > begin:
            yield SamplePart(number, True, end - begin, int(sample.loss_mask[begin:end].sum()))
        at = end
    if (rest := len(sample.input_ids) - at) > 0:
        yield SamplePart(None, False, rest, int(sample.loss_mask[at:].sum()))


def sample_json(sample: Sample, numbers: Mapping[str, int | None]) -> dict[str, Any]:
    """What a sample contains, without its tokens."""
    return {
        "session_id": sample.session_id,
        "interaction_ids": list(sample.interaction_ids),
        "turns": [numbers.get(name) for name in sample.interaction_ids],
        "tokens": len(sample.input_ids),
        "trained_tokens": int(sample.loss_mask.sum()),
        "reward": sample.reward,
        "weight": sample.weight,
        "purpose": sample.purpose,
        "agent": sample.agent,
        "recomputable": sample.recomputable,
        "parts": [asdict(part) for part in parts_of(sample, numbers)],
    }
