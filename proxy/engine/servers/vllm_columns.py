"""The side columns in vLLM's replies: a sampling mask for each token, and routed experts with the last part.

Rows that a reply lacks are missing, and are named. Rows of another form fail the reply.
"""

from __future__ import annotations

import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.engine.expert_layers import repeated
from proxy.engine.requests import GenerateRequest
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, ColumnRequest, Columns
from proxy.side_columns.kept_sets import kept_rows
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.types import Logprobs, SamplingParams
from tokengrove.errors import EngineFailed
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

MASK, ROUTED = "sampling_mask", "routed_experts"
"""The fields of a choice."""

START = "routed_experts_prompt_start"
"""The sampling parameter: the position of the first token whose experts are returned."""

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_EXPERTS = ("uint8", "uint16", "int32")
_DIMENSIONS = 3

Masks = list[Sequence[int] | None]


def first_experts(request: GenerateRequest) -> int | None:
    """The START of a request that wants experts; None for others.

    It is below the length of the prompt: vLLM before 0.30 ends with an error otherwise.
    """
    wanted = request.columns
    if wanted is None or Replay.EXPERTS not in wanted.replay:
        return None
    return min(wanted.start, len(request.prompt) - 1)


@dataclass(slots=True)
class ReplyColumns:
    """The side columns of one reply.

    `prompt`: the length of the prompt. `start`: the position of the first token whose experts were asked for; None: of
    none. `exact`: the logprobs of the reply are those after truncation.
    """

    wanted: ColumnRequest
    vocab_size: int
    prompt: int
    start: int | None
    exact: bool
    experts: SideColumn | None = None
    unmasked: int = 0
    """The number of tokens without a mask."""
    misfits: bool = False
    """The rows with experts are more or fewer than the tokens."""
    _masks: Masks = field(default_factory=list)
    _given: bool = False

    @property
    def keeps(self) -> bool:
        return Replay.KEPT in self.wanted.replay

    @property
    def lacks_experts(self) -> bool:
        """True if experts were asked for and have not arrived."""
        return self.start is not None and self.experts is None

    def add(self, choice: Mapping[str, Any], ids: Sequence[int], tokens: int) -> None:
        """Add the rows of a choice with the tokens `ids`. `tokens`: the number of tokens so far, with these.

        Raises EngineFailed for malformed rows.
        """
        if self.keeps:
            self._masks += self._masks_of(choice.get(MASK), ids)
        if self.start is not None and (told := choice.get(ROUTED)) is not None:
            self._add_experts(read_experts(told), self.start, self.prompt + tokens)

    def taken(self, logprobs: Logprobs, tokens: int) -> Columns | None:
        """The columns of the tokens since the last call, with these `logprobs`; None if there are no rows.

        `tokens`: the number of tokens so far, with these.
        """
        masks, self._masks = self._masks, []
        found: dict[str, SideColumn] = {}
        first = self.prompt + tokens - len(logprobs)
        if any(mask is not None for mask in masks):
            found[KEPT] = SideColumn(first, kept_rows(masks, self.vocab_size, self.wanted.max_kept))
        if self.keeps and self.exact and len(logprobs):
            found[KEPT_LOGPROBS] = SideColumn(first, SideRows(np.minimum(np.array(logprobs, np.float32), 0.0)))
        if self.experts is not None and not self._given:
            found[EXPERTS], self._given = self.experts, True
        return found or None

    def missing(self, sampling: SamplingParams, finish: FinishReason | None) -> Iterator[tuple[str, str]]:
        """The columns that the reply lacks rows of, each with the reason. `finish` None: it was not read to its end."""
        if self.unmasked:
            yield KEPT, "a reply has no sampling mask" + ("" if sampling.top_k > 0 else ": its request has no top_k")
        if self.misfits:
            yield EXPERTS, "a reply has more or fewer rows than tokens"
        elif self.lacks_experts and finish is None:
            yield EXPERTS, "a reply was ended before its last part, which has the rows"
        elif self.lacks_experts and finish is not FinishReason.ABORT:
            yield EXPERTS, "a reply has no routed experts"

    def _masks_of(self, told: Any, ids: Sequence[int]) -> Masks:
        """The mask of each token. Masks that are more or fewer than the tokens cannot be told apart."""
        if told is None or (isinstance(told, list) and len(told) != len(ids)):
            self.unmasked += len(ids)
            return [None] * len(ids)
        for token, mask in zip(ids, told, strict=True):
            self._check_mask(token, mask)
        return list(told)

    def _check_mask(self, token: int, told: Any) -> None:
        mask = np.array(told if isinstance(told, list) else None)
        if mask.dtype.kind != "i" or mask.ndim != 1:
            raise EngineFailed("the engine gave a sampling mask that is no list of token ids")
        if mask.min() < 0 or mask.max() >= self.vocab_size:
            wrong = mask.min() if mask.min() < 0 else mask.max()
            raise EngineFailed(
                f"the engine gave a sampling mask with token {wrong}, but the model's token ids are 0 to "
                f"{self.vocab_size - 1}"
            )
        if token not in mask:
            raise EngineFailed(f"the engine sampled token {token}, which its sampling mask does not have")

    def _add_experts(self, values: NDArray[Any], start: int, length: int) -> None:
        """Add the rows from `start` of a sequence of `length` tokens.

        vLLM has no row for the last token, which no forward pass has taken in; one more row is accepted.
        """
        if start + len(values) not in (length - 1, length):
            self.misfits = True
            return
        written = np.asarray(~repeated(values).all(axis=1))
        self.experts = SideColumn(start, SideRows(values).only(written))


def read_experts(told: Any) -> NDArray[Any]:
    """The routed experts in a choice, [rows, layers, k] uint8 or wider: the base64 of a .npy file.

    Raises EngineFailed for anything else.
    """
    try:
        content = binascii.a2b_base64(told, strict_mode=True)
        file = io.BytesIO(content)
        shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
        values = np.frombuffer(content, dtype, offset=file.tell())
        if len(shape) != _DIMENSIONS or 0 in shape[1:] or dtype.name not in _EXPERTS:
            raise EngineFailed(
                f"the engine gave routed experts of shape {shape} and dtype {dtype}, not of [tokens, layers, experts a "
                "token] and uint8 or uint16"
            )
        values = values.reshape(shape, order="F" if fortran else "C")
    except (binascii.Error, KeyError, TypeError, ValueError) as error:
        plain = "the engine gave routed experts that are no array in base64"
        raise EngineFailed(f"{plain}: {type(error).__name__}: {error}").showing(plain) from None
    return _unsigned(values)


def _unsigned(values: NDArray[Any]) -> NDArray[Any]:
    """The ids as unsigned integers, of which the largest stays free, as it marks a missing row."""
    if values.min(initial=0) < 0:
        raise EngineFailed(f"the engine gave a routed expert {values.min()}, which no model has")
    dtype = values.dtype.newbyteorder("=") if values.dtype.kind == "u" else np.dtype(np.uint32)
    if values.max(initial=0) == np.iinfo(dtype).max:
        dtype = np.dtype(np.uint32)
    return values.astype(dtype, copy=False)
