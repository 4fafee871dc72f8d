"""The logprobs of prompt tokens in SGLang's replies: `input_token_logprobs` and `input_top_logprobs`.

They begin with the token at `logprob_start_len`, which has no logprob, since the one before it is not looked at. So a
request starts one token before the first scored one. The prefix cache is used up to there. They are of the model
itself: temperature, penalties, bias and truncation concern sampled tokens only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.engine.requests import GenerateRequest
from proxy.engine.scored_prompt import ScoredPrompt, Tops
from proxy.types import Logprobs
from tokengrove.errors import EngineFailed, UnsupportedParameter


def scored_prompt(request: GenerateRequest, vocab_size: int) -> ScoredPrompt:
    """The scored tokens of a request. Raises InvalidRequest, and UnsupportedParameter for placeholders of images.

    SGLang replaces placeholders by hashes of their images, and would give the logprob of the vocabulary's last token.
    """
    scored = ScoredPrompt.of(request, vocab_size)
    if request.images is not None and any(image.start + image.length > scored.first for image in request.images.placed):
        raise UnsupportedParameter(
            "SGLang gives no logprobs of the placeholders of images; ask for those of the tokens after the last image",
            param="scored_from",
        )
    return scored


def read_scores(scored: ScoredPrompt, meta: Mapping[str, Any]) -> tuple[Logprobs, tuple[Tops, ...]]:
    """The logprobs of the scored tokens, and their alternatives. Raises EngineFailed, and TypeError or LookupError for
    another form than SGLang's.

    SGLang names the last token of the vocabulary 0, and so placeholders of images, of which the one before the first
    scored token may be one.
    """
    told = meta.get("input_token_logprobs") or []
    if len(told) != len(scored) + 1:
        raise EngineFailed(f"the engine gave {max(len(told) - 1, 0)} logprobs for {len(scored)} tokens of the prompt")
    last = scored.vocab_size - 1
    for entry, token in zip(told[1:], scored.ids, strict=True):
        if entry[1] != token and not (entry[1] == 0 and token == last):
            raise EngineFailed(f"the engine gave the logprob of token {entry[1]}, but the prompt has token {token}")
    tops = tuple(map(_ranked, meta["input_top_logprobs"][1:])) if scored.top else ()
    return scored.check([entry[0] for entry in told[1:]], tops), tops


def _ranked(top: Sequence[Sequence[Any]]) -> Tops:
    return tuple((entry[1], entry[0]) for entry in top)
