"""The logprobs of prompt tokens in vLLM's replies: `prompt_logprobs`.

Replies have them only if they are not streamed, for the whole prompt: vLLM then takes nothing from its prefix cache.
They are of the model itself in both logprobs modes: prompt tokens go through no sampling processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.engine.requests import GenerateRequest
from proxy.engine.scored_prompt import ScoredPrompt, Tops
from proxy.types import Logprobs
from tokengrove.errors import EngineFailed

_FIELD = "prompt_logprobs"
_MINUS_INFINITY = -9999.0
"""The value that vLLM writes for minus infinity. It leaves other values as they are, also lower ones."""


def ask_for_scores(request: GenerateRequest, body: dict[str, Any], params: dict[str, Any]) -> None:
    """Make a streamed request one that asks for logprobs of its prompt. `params`: its sampling parameters."""
    params[_FIELD] = request.top_logprobs
    del body["stream"], body["stream_options"]


def read_scores(
    scored: ScoredPrompt, answer: Mapping[str, Any], choice: Mapping[str, Any]
) -> tuple[Logprobs, tuple[Tops, ...]]:
    """The logprobs of the scored tokens, and their alternatives. Raises EngineFailed, and TypeError, ValueError,
    LookupError or AttributeError for another form than vLLM's.

    An answer of GENERATE has them itself, one of COMPLETIONS in its choice: a dict for each token of the prompt except
    the first, with the token and its likeliest alternatives by id.
    """
    told = answer.get(_FIELD) or choice.get(_FIELD)
    if not told:
        raise EngineFailed("the engine gave no logprobs of the prompt")
    if len(told) != scored.first + len(scored):
        raise EngineFailed(
            f"the engine gave logprobs of {len(told)} tokens for a prompt of {scored.first + len(scored)} tokens"
        )
    values, tops = [], []
    for token, entries in zip(scored.ids, told[scored.first :], strict=True):
        if (own := entries.get(str(token))) is None:
            raise EngineFailed(f"the engine gave logprobs of other tokens than the prompt has: token {token} has none")
        if own["logprob"] == _MINUS_INFINITY:
            raise EngineFailed(
                f"the engine gave token {token} of the prompt the logprob {_MINUS_INFINITY:g}, which vLLM writes for "
                "probability 0"
            )
        values.append(own["logprob"])
        if scored.top:
            tops.append(_ranked(entries, scored.top))
    return scored.check(values, tops), tuple(tops)


def _ranked(entries: Mapping[str, Mapping[str, Any]], top: int) -> Tops:
    """The `top` likeliest tokens of one position, which may also have its own token, without impossible ones."""
    ranked = sorted((entry["rank"], int(token), entry["logprob"]) for token, entry in entries.items())
    return tuple((token, value) for rank, token, value in ranked if rank <= top and value != _MINUS_INFINITY)
