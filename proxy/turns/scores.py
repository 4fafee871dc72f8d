"""Logprobs of given tokens under a route: nothing is sampled for anybody, and nothing is recorded.

All logprobs of a prompt are of one weight version: a prompt during which the weights changed is scored again.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from proxy.engine.chunks import LARGEST_LOGPROB, TokenChunk
from proxy.engine.interface import Capability, EngineInfo
from proxy.engine.requests import GenerateRequest
from proxy.images.prompt_images import PromptImages
from proxy.prompt_ids import PromptIds
from proxy.turns.route import EngineRoute
from proxy.types import Ids, Logprobs, SamplingParams
from tokengrove.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineIncapable,
    EngineUnavailable,
    UnsupportedParameter,
)

_MOST_UPDATES = 5
"""A prompt is scored again after at most this many updates of the weights during it."""

Tops = tuple[tuple[tuple[int, float], ...], ...]


_AFFINITY = "score "
"""Prefix of the placement key of scores. No session id contains a space, so no key is equal to one."""


class Scored(NamedTuple):
    """Tokens to score: those of `ids` from position `start` on, which is at least 1. `images`: those of `ids`.

    `session_id`: the session that the tokens are of, "" if none; tokens of one session prefer the same engine server.
    """

    ids: Ids
    start: int
    images: PromptImages | None = None
    session_id: str = ""


class Scores(NamedTuple):
    """The logprobs of the tokens that were asked for, and alternatives of each, highest first; none if not requested.

    `version`: the weight version, or that of the adapter. `cached_tokens`: tokens found in the prefix cache, if known.
    """

    logprobs: Logprobs
    tops: Tops
    version: int
    cached_tokens: int | None


def check_scores(info: EngineInfo, temperature: float) -> None:
    """Raise EngineIncapable or UnsupportedParameter if an engine cannot score tokens at this temperature."""
    if Capability.PROMPT_LOGPROBS not in info.capabilities:
        raise EngineIncapable(f"the engine {info.name!r} gives no logprobs of given tokens")
    if temperature != 1.0 and Capability.PROMPT_TEMPERATURE not in info.capabilities:
        raise UnsupportedParameter(
            f"the engine {info.name!r} gives logprobs of given tokens at temperature 1 only; leave 'temperature' out",
            param="temperature",
        )


async def score(route: EngineRoute, wanted: Scored, temperature: float, top: int, adapter: int | None) -> Scores:
    """Score tokens under a route. `top`: the number of alternatives. `adapter`: its version; None: the base model.

    Raises InvalidRequest for ids outside of the vocabulary, ContextLengthExceeded (the engine samples one more token),
    EngineFailed for a wrong answer, EngineUnavailable if the weights keep changing, and the errors of `Gate.sample`.
    """
    gate = route.gate
    if len(wanted.ids) >= (most := gate.info().context_length):
        raise ContextLengthExceeded(prompt_tokens=len(wanted.ids), context_tokens=most, max_tokens=1)
    for _ in range(_MOST_UPDATES):
        await gate.enter()
        before, chunks = gate.info().weight_version, list[TokenChunk]()
        request = GenerateRequest(
            f"score-{uuid.uuid4().hex}",
            PromptIds(wanted.ids),
            SamplingParams(temperature=temperature, max_tokens=1),
            top_logprobs=top,
            session_id=_AFFINITY + wanted.session_id if wanted.session_id else "",
            whole=True,
            images=wanted.images,
            adapter=adapter,
            scored_from=wanted.start,
        )
        await gate.sample(request, chunks.append)
        if adapter is not None or before == gate.info().weight_version:
            return _scores(chunks, wanted, top)
    raise EngineUnavailable("the weights changed each time the tokens were scored; pause the engine, or try again")


def _scores(chunks: Sequence[TokenChunk], wanted: Scored, top: int) -> Scores:
    """The scores in the chunks of one output. Raises EngineFailed if they are not those that were asked for."""
    found = [chunk for chunk in chunks if chunk.prompt_logprobs is not None]
    expected = len(wanted.ids) - wanted.start
    if len(found) != 1 or found[0].prompt_logprobs is None or len(found[0].prompt_logprobs) != expected:
        given = sum(len(chunk.prompt_logprobs or ()) for chunk in found)
        raise EngineFailed(f"the engine gave {given} logprobs for {expected} tokens")
    (chunk,) = found
    if not math.isfinite(sum(chunk.prompt_logprobs or ())) or max(chunk.prompt_logprobs or ()) > LARGEST_LOGPROB:
        raise EngineFailed("the engine's answer is wrong: a logprob is above 0 or not a finite number")
    if top and len(chunk.prompt_top) != expected:
        raise EngineFailed(f"the engine gave alternatives for {len(chunk.prompt_top)} of {expected} tokens")
    cached = next((each.cached_tokens for each in chunks if each.cached_tokens is not None), None)
    return Scores(chunk.prompt_logprobs or Logprobs("f"), chunk.prompt_top, chunk.version, cached)
