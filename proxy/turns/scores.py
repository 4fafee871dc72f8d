"""Logprobs of given tokens under a route: nothing is sampled for anybody, and nothing is recorded.

All logprobs of a prompt are of one weight version: engines score a prompt again if the weights changed meanwhile.
"""

from __future__ import annotations

import uuid
from typing import NamedTuple

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import Capability, EngineInfo
from proxy.engine.requests import GenerateRequest
from proxy.engine.scored_prompt import ScoredPrompt, Tops
from proxy.images.prompt_images import PromptImages
from proxy.prompt_ids import PromptIds
from proxy.turns.route import EngineRoute, Routes
from proxy.types import Ids, Interaction, Logprobs, SamplingParams
from tokengrove.errors import (
    ContextLengthExceeded,
    EngineFailed,
    EngineIncapable,
    InvalidRequest,
    UnsupportedParameter,
    brief,
)

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
    tops: tuple[Tops, ...]
    version: int
    cached_tokens: int | None


def check_scores(info: EngineInfo, temperature: float) -> None:
    """Raise EngineIncapable or UnsupportedParameter if an engine cannot score tokens at this temperature."""
    if Capability.PROMPT_LOGPROBS not in info.capabilities:
        raise EngineIncapable(f"the engine {brief(info.name)} gives no logprobs of given tokens")
    if temperature != 1.0 and Capability.PROMPT_TEMPERATURE not in info.capabilities:
        raise UnsupportedParameter(
            f"the engine {brief(info.name)} gives logprobs of given tokens at temperature 1 only; leave 'temperature' "
            "out",
            param="temperature",
        )


def check_tokens(routes: Routes, turn: Interaction, route: EngineRoute) -> None:
    """Raise InvalidRequest if the tokens of a turn are of another tokenizer than those of a route."""
    own = routes.reader(turn.route)
    if own is route or (own is not None and own.renderer.has_tokens_of(route.renderer)):
        return
    why = "it has another tokenizer" if own is not None else "this server does not serve that model any more"
    raise InvalidRequest(
        f"the turn {turn.id} is of the model {brief(turn.route)}, whose token ids {brief(route.name)} cannot "
        f"score: {why}. Name a model with the same tokenizer",
        param="model",
    )


async def score(route: EngineRoute, wanted: Scored, temperature: float, top: int, adapter: int | None) -> Scores:
    """Score tokens under a route. `top`: the number of alternatives. `adapter`: its version; None: the base model.

    Raises InvalidRequest for ids outside of the vocabulary, ContextLengthExceeded (the engine samples one more token),
    EngineFailed for a wrong answer, and the errors of `Gate.sample`.
    """
    info = route.gate.info()
    if len(wanted.ids) >= info.context_length:
        raise ContextLengthExceeded(prompt_tokens=len(wanted.ids), context_tokens=info.context_length, max_tokens=1)
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
    chunks: list[TokenChunk] = []
    await route.gate.sample(request, chunks.append)
    found = [chunk for chunk in chunks if chunk.prompt_logprobs is not None]
    if len(found) != 1:
        raise EngineFailed(f"the engine gave the logprobs of a prompt {len(found)} times")
    (chunk,) = found
    logprobs = ScoredPrompt.of(request, info.vocab_size).check(chunk.prompt_logprobs or (), chunk.prompt_top)
    cached = next((each.cached_tokens for each in chunks if each.cached_tokens is not None), None)
    return Scores(logprobs, chunk.prompt_top, chunk.version, cached)
