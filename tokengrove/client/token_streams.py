"""What a trainer tells of samples, as bodies of `POST /trajectories/annotate`. Only trained tokens are sent.

Values are rounded to float32, which the server stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from tokengrove.client.values import Json, Sample
from tokengrove.errors import InvalidRequest
from tokengrove.rows_beside import runs_of

Align = Literal["tokens", "next", "response", "trained"]
Streams = Mapping[str, Sequence[Any] | NDArray[Any]]
Scalars = Mapping[str, Sequence[float] | NDArray[Any]]
_MOST_SAMPLES = 256
_MOST_VALUES = 400_000
"""The most values of a body. The server accepts three times as many by default."""


def bodies(
    samples: Sequence[Sample], step: int, trainer: str, streams: Streams, scalars: Scalars, align: Align
) -> Iterator[dict[str, Json]]:
    """Yield the bodies. Raises InvalidRequest for values that do not fit the samples."""
    for name, values in (*streams.items(), *scalars.items()):
        if len(values) != len(samples):
            raise InvalidRequest(f"{name!r} has values of {len(values)} samples, not of {len(samples)}", param=name)
    page: list[Json] = []
    size = 0
    for at, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            message = f"samples[{at}] is no sample: of a sequence, give its samples(), with values[sequence.path(row)]"
            raise InvalidRequest(message, param="samples")
        given = {name: _trained(values[at], sample, align, f"{name}[{at}]") for name, values in streams.items()}
        entry = _entry(sample, given, {name: float(values[at]) for name, values in scalars.items()})
        if entry is None:
            continue
        page.append(entry)
        size += sum(map(len, given.values()))
        if len(page) == _MOST_SAMPLES or size >= _MOST_VALUES:
            yield {"trainer": trainer, "step": step, "samples": page}
            page, size = [], 0
    if page:
        yield {"trainer": trainer, "step": step, "samples": page}


def _trained(values: Any, sample: Sample, align: Align, name: str) -> NDArray[np.float32]:
    """The values of the trained tokens. Rows of a padded batch have more values than the sample has tokens."""
    found = np.asarray(values.detach().cpu().float() if hasattr(values, "detach") else values, np.float32)
    trained = np.flatnonzero(sample.loss_mask)
    if align == "trained":
        if found.shape != trained.shape:
            raise _unlike(name, found, f"{len(trained)} trained tokens")
        return found
    start = {"tokens": 0, "next": 1, "response": _response_start(sample)}[align]
    if found.ndim != 1 or len(found) < len(sample.loss_mask) - start:
        raise _unlike(name, found, f"{len(sample.loss_mask) - start} tokens (align={align!r})")
    if len(trained) and trained[0] < start:
        raise InvalidRequest(f"{name!r} has no value for the first token, which is trained (align='next')", param=name)
    return found[trained - start]


def _response_start(sample: Sample) -> int:
    """The index of the first token of the response: after the prompt of layout padded, else the first sampled token."""
    if "prompts" in sample.extra:
        return len(sample.extra["prompts"])
    starts = [int(turn["span"][0]) for turn in sample.turns if turn.get("span") and turn["span"][0] < turn["span"][1]]
    return min([*starts, *np.flatnonzero(sample.loss_mask)[:1].tolist()], default=0)


def _unlike(name: str, found: NDArray[Any], expected: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name!r} has values of shape {list(found.shape)}, and the sample has {expected}", param=name
    )


def _entry(sample: Sample, streams: Mapping[str, NDArray[np.float32]], scalars: Mapping[str, float]) -> Json:
    """A sample of a body, with its trained tokens only; None without any."""
    turns, at = [], 0
    for turn in sample.turns:
        if turn.get("span") is None:
            continue
        first, end = turn["span"]
        for start, stop in runs_of(sample.loss_mask[first:end] > 0):
            output_start = int(turn.get("output_start", 0)) + start
            span = [at, at + stop - start]
            turns.append({"interaction_id": turn["interaction_id"], "span": span, "output_start": output_start})
            at += stop - start
    if not turns:
        return None
    if at != int((sample.loss_mask > 0).sum()):
        raise InvalidRequest(
            f"sample {sample.interaction_id!r} has trained tokens in no turn: export it with its `turns`"
        )
    told = {name: orjson.loads(orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY)) for name, each in streams.items()}
    return {"turns": turns, "streams": told, "scalars": dict(scalars)}
