"""The prompt tokens whose logprobs a request asks for, and the check of the logprobs that an engine gives for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.engine.callbacks import Sample
from proxy.engine.chunks import LARGEST_LOGPROB, TakeChunk, TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.types import Ids, Logprobs
from tokengrove.errors import EngineFailed, InvalidRequest
from tokengrove.reasons import FinishReason

Tops = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """The scored tokens of one request. `first`: the position of the first. `ids`: their ids.

    `top`: the number of alternatives per token. `vocab_size`: as in `check_request`.
    """

    first: int
    ids: Ids
    top: int
    vocab_size: int

    @classmethod
    def of(cls, request: GenerateRequest, vocab_size: int) -> ScoredPrompt:
        """The scored tokens of a request with `scored_from`. Raises InvalidRequest if that is no position after one."""
        first = request.scored_from or 0
        if not 1 <= first <= len(request.prompt):
            raise InvalidRequest(
                f"scored_from must be between 1 and the length of the prompt, {len(request.prompt)}",
                param="scored_from",
            )
        return cls(first, request.input_ids[first:], request.top_logprobs, vocab_size)

    def __len__(self) -> int:
        return len(self.ids)

    def check(self, values: Sequence[Any], tops: Sequence[Tops]) -> Logprobs:
        """The logprobs as an array. Raises EngineFailed unless there is one finite logprob per token.

        `tops`: the alternatives of each token; empty if none were requested.
        """
        if len(values) != len(self):
            raise EngineFailed(f"the engine gave {len(values)} logprobs for {len(self)} tokens of the prompt")
        if len(tops) != (len(self) if self.top else 0):
            raise EngineFailed(
                f"the engine gave {len(tops)} lists of alternatives for {len(self)} tokens of the prompt"
            )
        try:
            logprobs = Logprobs("f", values)
        except TypeError:
            raise EngineFailed("the engine gave a token of the prompt without its logprob") from None
        _check_values(logprobs)
        for top in tops:
            if len(top) > self.top:
                raise EngineFailed(f"the engine gave {len(top)} alternatives of a token, but was asked for {self.top}")
            if not all(type(token) is int and 0 <= token < self.vocab_size for token, _ in top):
                raise EngineFailed("the engine gave an alternative that is no token of the model")
            if not all(type(value) in (float, int) for _, value in top):
                raise EngineFailed("the engine gave an alternative without its logprob")
            _check_values([value for _, value in top])
        return logprobs


def _check_values(values: Sequence[float]) -> None:
    """Raise EngineFailed for a logprob of the prompt that is not finite or is above 0 beyond rounding."""
    if not math.isfinite(sum(values)):
        wrong = "NaN" if any(map(math.isnan, values)) else "infinite"
        raise EngineFailed(f"the engine's answer is wrong: a logprob of the prompt is {wrong}")
    if values and (highest := max(values)) > LARGEST_LOGPROB:
        raise EngineFailed(
            f"the engine gave a token of the prompt logprob {highest:g}; the logarithm of a probability is at most 0"
        )


async def sample_scores(
    sample: Sample, request: GenerateRequest, take: TakeChunk, version: Callable[[], int]
) -> FinishReason | None:
    """`sample` a request with `scored_from`, again whenever the weights changed meanwhile. Raises like `sample`.

    A pause can fall between two parts of a prompt, whose logprobs would then be of two versions. The output is short,
    so it is passed on only when it is complete. `version`: tells the current weight version of the engine.
    """
    finish, before = None, None
    chunks: list[TokenChunk] = []
    while finish is not FinishReason.ABORT and before != version():
        chunks.clear()
        before = version()
        finish = await sample(request, chunks.append)
    stopped = None
    for chunk in chunks:
        if stopped is None:
            stopped = take(chunk)
    return stopped or finish
