"""Side columns of SGLang: what a request asks for, and the rows that its reply has.

A row is that of the pass that the column names, or it is missing: a row that no router can have given, and one that a
retraction has computed again, are missing. A set that cannot be that of its token, and rows that fit neither the model
nor the request, fail the reply.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.engine.chunks import LARGEST_LOGPROB
from proxy.engine.expert_layers import ExpertLayers, repeated
from proxy.engine.requests import GenerateRequest, rest_of
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, ColumnRequest
from proxy.side_columns.kept_sets import ALL, kept_rows
from proxy.side_columns.rows import SideColumn, SideRows, spread
from proxy.types import Ids
from tokengrove.errors import EngineFailed
from tokengrove.options.start import Replay
from tokengrove.rows_beside import missing_value

MOST_KEPT = "sampling_mask_max_tokens"
"""The fact about the largest kept set that SGLang reports. It aborts a request with a larger one."""

_WITHOUT_MASK = re.compile(r"sampling[_ -](mask|support)")
"""What SGLang writes if it refuses or ends a request because of its kept sets."""


def refuses_masks(message: str) -> bool:
    """True if SGLang has refused or ended a request because kept sets were asked for."""
    return _WITHOUT_MASK.search(message) is not None


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The side columns of one request.

    `masks`: kept sets are asked of SGLang. `whole`: sampling leaves nothing out, so every kept set is the whole
    vocabulary. `layers`: the expert layers of the model; None: no experts are asked for.
    """

    columns: ColumnRequest
    vocab_size: int
    masks: bool
    whole: bool
    layers: ExpertLayers | None

    def fields(self, prompt_tokens: int) -> dict[str, Any]:
        """The fields of SGLang's request. `prompt_tokens`: the length of its prompt."""
        asked: dict[str, Any] = {"return_sampling_mask": True} if self.masks else {}
        if self.layers is not None:
            start = min(self.columns.start, prompt_tokens)
            asked |= {"return_routed_experts": True, "routed_experts_start_len": start}
        return asked


def without_masks(request: GenerateRequest, told: Ids) -> GenerateRequest:
    """The rest of a request that SGLang has ended because of its kept sets, after the tokens `told`.

    Its side columns have no kept sets. The experts of earlier tokens are lost with the request that sampled them.
    """
    rest = rest_of(request, told, len(request.prompt) + len(told) - 1 if told else 0)
    assert rest.columns is not None
    return replace(rest, columns=replace(rest.columns, replay=rest.columns.replay - {Replay.KEPT}))


def replay_plan(
    request: GenerateRequest,
    records: frozenset[Replay],
    layers: ExpertLayers | None,
    facts: Mapping[str, Any],
    *,
    vocab_size: int,
    bans: bool,
) -> ReplayPlan | None:
    """The side columns of `request` that an SGLang with `facts` gives; None: none.

    `records`, `layers`: as in EngineInfo, and of its model. `bans`: tokens are never sampled that the logprobs count.
    """
    wanted = request.columns
    if wanted is None or not wanted.replay & records & {Replay.KEPT, Replay.EXPERTS}:
        return None
    kept = Replay.KEPT in wanted.replay & records
    drawn = request.sampling.temperature > 0.0
    whole = kept and not bans and _leaves_all(request)
    masks = kept and drawn and not whole and _reports_set(request.sampling.top_k, facts.get(MOST_KEPT))
    experts = layers if Replay.EXPERTS in wanted.replay & records else None
    return ReplayPlan(wanted, vocab_size, masks, whole, experts)


def _leaves_all(request: GenerateRequest) -> bool:
    """Whether every token can be drawn. At temperature 0, logprobs are of the distribution before truncation."""
    sampling = request.sampling
    if request.grammar is not None or sampling.min_tokens:
        return False
    truncates = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return sampling.temperature == 0.0 or not truncates


def _reports_set(top_k: int, most: Any) -> bool:
    """Whether SGLang takes a request for kept sets with this top_k: it asks for a finite one."""
    return top_k > 0 and (type(most) is not int or top_k <= most)


class ReplayRows:
    """The rows of one reply in progress, whose prompt has `prompt_tokens`."""

    def __init__(self, plan: ReplayPlan, prompt_tokens: int) -> None:
        self._plan, self._prompt_tokens = plan, prompt_tokens
        self._new: dict[str, list[SideColumn]] = {}
        self._retractions: Any = 0
        self._recomputed = 0
        self._experts = False

    @property
    def lacks_experts(self) -> bool:
        """True if experts were asked for and have not arrived."""
        return self._plan.layers is not None and not self._experts

    def read(self, meta: Mapping[str, Any], total: int) -> None:
        """Take the rows of experts from a part with `total` tokens. Raises EngineFailed."""
        retractions = meta.get("num_retractions") or 0
        if retractions != self._retractions:
            # A pass took in sampled tokens again and sampled the next one, so at most all but the last two are wrong.
            self._retractions, self._recomputed = retractions, max(total - 2, 0)
        told, layers = meta.get("routed_experts"), self._plan.layers
        if told is None or layers is None:
            return
        self._experts = True
        end = self._prompt_tokens + total - 1
        start = min(self._plan.columns.start, self._prompt_tokens)
        column = expert_rows(_flat(told), layers, start, end)
        if column is not None and len(column.rows):
            self._add(EXPERTS, column.without(self._prompt_tokens, self._prompt_tokens + self._recomputed))

    def read_sets(
        self, meta: Mapping[str, Any], place: slice, tokens: Sequence[int], sampled: Sequence[Sequence[Any]]
    ) -> None:
        """Take the kept sets of the new `tokens` of a part.

        `place`: where they are in the lists of the reply so far. `sampled`: their entries of logprobs. Raises
        EngineFailed, and TypeError or ValueError for lists of another form.
        """
        start = self._prompt_tokens + place.start
        if self._plan.whole:
            rows = SideRows(np.zeros(0, np.uint32), np.full(len(tokens), ALL, np.int32))
            self._add(KEPT, SideColumn(start, rows))
            self._add(KEPT_LOGPROBS, SideColumn(start, _logprobs([entry[0] for entry in sampled])))
            return
        sets = meta.get("output_token_sampling_mask")
        if not self._plan.masks or sets is None:
            return
        logprobs = meta.get("output_token_sampling_logprobs") or [None] * len(sets)
        first = _first_row(meta, sets, place)
        chosen = [_at(sets, number - first) for number in range(place.start, place.stop)]
        for token, kept in zip(tokens, chosen, strict=True):
            if kept is not None and token not in kept:
                raise EngineFailed(f"the engine gave token {token} a kept set without that token")
        rows = kept_rows(chosen, self._plan.vocab_size, self._plan.columns.max_kept)
        self._add(KEPT, SideColumn(start, rows))
        told = [_at(logprobs, number - first) for number in range(place.start, place.stop)]
        self._add(KEPT_LOGPROBS, SideColumn(start, _logprobs(told)))

    def taken(self) -> dict[str, SideColumn] | None:
        """The rows since the last call; None if there are none."""
        found, self._new = self._new, {}
        return {name: _together(columns) for name, columns in found.items()} or None

    def _add(self, name: str, column: SideColumn) -> None:
        self._new.setdefault(name, []).append(column)


def expert_rows(flat: NDArray[Any], layers: ExpertLayers, start: int, end: int) -> SideColumn | None:
    """The experts of the tokens [start, end), from the ids of all their layers; None if rows are missing.

    A server may also report the last token, which no pass took in, and rows from the start of the prompt. Layers
    without experts are left out. Raises EngineFailed if the ids are no rows of this model, or too many.
    """
    asked = max(end - start, 0)
    for width in dict.fromkeys((layers.layers, len(layers.routed))):
        size = width * layers.per_token
        for first, number in ((start, asked), (start, asked + 1), (0, end), (0, end + 1)):
            if len(flat) == number * size:
                rows = flat.reshape(number, width, layers.per_token)[start - first : start - first + asked]
                return SideColumn(start, _routes(rows, layers))
    sizes = [width * layers.per_token for width in (layers.layers, len(layers.routed))]
    if all(len(flat) % size for size in sizes):
        raise EngineFailed(
            f"the engine gave {len(flat)} expert ids, which are no rows of {layers.layers} layers with "
            f"{layers.per_token} experts each"
        )
    if len(flat) > asked * max(sizes):
        raise EngineFailed(f"the engine gave {len(flat)} expert ids, more than those of tokens {start} to {end - 1}")
    return None


def _routes(rows: NDArray[Any], layers: ExpertLayers) -> SideRows:
    """Rows of the layers with experts, in the smallest dtype that can also hold a missing row.

    Rows with a negative, unknown or repeated expert are missing.
    """
    partial = len(layers.routed) < layers.layers and rows.shape[1] == layers.layers
    routed = rows[:, list(layers.routed)] if partial else rows
    least, largest = int(routed.min(initial=0)), int(routed.max(initial=0))
    values = routed.astype(np.min_scalar_type(largest + 1))
    wrong = repeated(values).any(axis=1)
    if least < 0:
        wrong |= (routed < 0).any(axis=(1, 2))
    if layers.experts and largest >= layers.experts:
        wrong |= (routed >= layers.experts).any(axis=(1, 2))
    values[wrong] = missing_value(values.dtype)
    return SideRows(values)


def _flat(told: Any) -> NDArray[Any]:
    """The ids of a reply. Raises EngineFailed if they are not int32 in base64."""
    try:
        return np.frombuffer(binascii.a2b_base64(told, strict_mode=True), "<i4")
    except (TypeError, ValueError):
        raise EngineFailed("the engine gave experts that are no base64 of int32") from None


def _first_row(meta: Mapping[str, Any], sets: Sequence[Any], place: slice) -> int:
    """The number of the token of the first set: the lists of a part are of all tokens so far, or only of the new ones.

    The number of sets so far, which SGLang reports beside them, tells which.
    """
    so_far = meta.get("output_token_sampling_mask_length")
    if type(so_far) is int and so_far >= len(sets):
        return so_far - len(sets)
    return 0 if len(sets) >= place.stop else place.stop - len(sets)


def _at(listed: Sequence[Any], number: int) -> Any:
    return listed[number] if 0 <= number < len(listed) else None


def _logprobs(told: Sequence[Any]) -> SideRows:
    """A column of logprobs; None: missing. Raises EngineFailed for one above 0."""
    values = np.array([np.nan if each is None else each for each in told], np.float32)
    if (values > LARGEST_LOGPROB).any():
        raise EngineFailed("the engine's answer is wrong: a logprob within a kept set is above 0")
    return SideRows(np.minimum(values, np.float32(0.0)))


def _together(columns: Sequence[SideColumn]) -> SideColumn:
    """Columns of parts that arrived together as one."""
    start = min(column.start for column in columns)
    return SideColumn(start, spread(columns, start, max(column.end for column in columns)))
