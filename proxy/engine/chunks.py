"""Chunks of sampled tokens, as engines yield them, and the validation of every chunk.

Logprob rule, for every engine: a token's logprob is the natural log of its probability in the distribution after
penalties, logit bias, temperature and grammar mask, and before top-k, top-p and min-p truncation. At temperature 0 the
likeliest token is taken, and its logprob is that of temperature 1. An engine that cannot report it refuses the request,
or says which other distribution its logprobs are of (`TokenChunk.logprobs_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from proxy.engine.versions import LARGEST_VERSION
from proxy.side_columns.columns import Columns
from proxy.types import Ids, Logprobs, Sampler, VersionRuns
from tokengrove.errors import EngineFailed
from tokengrove.reasons import FinishReason, LogprobsOf


@dataclass(slots=True)
class TokenChunk:
    """Sampled tokens, in order. Chunks are never modified.

    The last chunk, and only the last, has `finish`; it may have no tokens.

    `logprobs`: float32, one per id, by the rule above. `version`: the weight version that sampled all of `ids`.
    `top_logprobs`: a tuple of (token id, logprob) per id, highest first; empty if not requested. `cached_tokens`: the
    number of prompt tokens found in the prefix cache, if the engine reports it. `text`: the answer as text instead of
    ids (mailbox); the turn encodes it. `sampled` False: the logprobs are unknown and filled with zeros. `corrected`:
    runs of (count, version) that replace the versions of the tokens just before this chunk, from an engine that learns
    only later which weights sampled them; such a chunk may have no tokens. `unmasked`: float32, one per id, the
    logprobs by the rule but without the grammar mask, from an engine that is configured to report them. `unsure`: the
    change in the number of tokens with an uncertain version, negative if the chunk settles versions of earlier tokens.
    Uncertain tokens carry the last version that is believed. `logprobs_of`: the distribution that `logprobs` are of.
    `columns`: rows of side columns by name, at positions counted from the start of the prompt; None: no rows.
    `prompt_logprobs`: float32, the logprobs of the prompt tokens from `GenerateRequest.scored_from` to the end, in one
    chunk of the output; of the model at the temperature of the request, which is 1 unless the engine has
    `Capability.PROMPT_TEMPERATURE`. `prompt_top`: their likeliest alternatives, as `top_logprobs`. All are of one
    weight version. `sampler`: the engine server that sampled `ids`; None: the engine is the only one.
    """

    ids: Ids
    logprobs: Logprobs
    version: int = 0
    finish: FinishReason | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int | None = None
    text: str | None = None
    sampled: bool = True
    corrected: VersionRuns = ()
    unmasked: Logprobs | None = None
    unsure: int = 0
    logprobs_of: LogprobsOf = LogprobsOf.RULE
    columns: Columns | None = None
    prompt_logprobs: Logprobs | None = None
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    sampler: Sampler | None = None


LARGEST_LOGPROB = 1e-3
"""The largest value that rounding can make of the logprob 0: float32 has 7 digits, and logits are below some
thousands."""

TakeChunk = Callable[[TokenChunk], FinishReason | None]
"""A function that takes the chunks of an output one by one. Returns a reason to end sampling, or None to continue."""


def once_counted(take: TakeChunk) -> TakeChunk:
    """`take` for a later request of one output, whose cached tokens are counted already."""

    def again(chunk: TokenChunk) -> FinishReason | None:
        return take(chunk if chunk.cached_tokens is None else replace(chunk, cached_tokens=None))

    return again


def of_adapter(take: TakeChunk, version: int) -> TakeChunk:
    """`take` for an output that an adapter samples: its tokens carry the adapter's version, not that of the weights.

    What the engine tells of the versions of its weights is dropped.
    """

    def taken(chunk: TokenChunk) -> FinishReason | None:
        told = chunk.ids or chunk.finish is not None or chunk.columns or chunk.cached_tokens is not None
        return take(replace(chunk, version=version, corrected=(), unsure=0)) if told else None

    return taken


def check_chunk(chunk: TokenChunk, vocab_size: int, most: int) -> None:
    """Raise EngineFailed for an invalid chunk.

    A chunk must have at most `most` tokens, ids below `vocab_size`, one logprob per id that is finite and not above 0
    beyond rounding, and valid weight versions. An answer of another model (`sampled` False) may be longer, since that
    model counted its own tokens.
    """
    ids = chunk.ids
    if len(ids) != len(chunk.logprobs):
        raise EngineFailed(f"the engine gave {len(chunk.logprobs)} logprobs for {len(ids)} tokens")
    if ids:
        if len(ids) > most and chunk.sampled:
            raise EngineFailed(f"the engine gave {len(ids) - most} tokens more than it was asked for (max_tokens)")
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise EngineFailed(f"the engine gave token {wrong}, but the model's token ids are 0 to {vocab_size - 1}")
        if chunk.top_logprobs:
            _check_tops(chunk.top_logprobs, len(ids), vocab_size)
        if chunk.unmasked is not None and len(chunk.unmasked) != len(ids):
            raise EngineFailed(f"the engine gave {len(chunk.unmasked)} unmasked logprobs for {len(ids)} tokens")
        for logprobs in (chunk.logprobs,) if chunk.unmasked is None else (chunk.logprobs, chunk.unmasked):
            if not math.isfinite(sum(logprobs)):  # float32 values cannot overflow a sum of doubles
                wrong_one = "NaN" if any(map(math.isnan, logprobs)) else "infinite"
                raise EngineFailed(f"the engine's answer is wrong: a logprob is {wrong_one}")
            if (highest := max(logprobs)) > LARGEST_LOGPROB:
                raise EngineFailed(f"the engine gave logprob {highest:g}; the logarithm of a probability is at most 0")
    if chunk.corrected or not 0 <= chunk.version <= LARGEST_VERSION:
        _check_versions(((1, chunk.version), *chunk.corrected))


def _check_tops(tops: Sequence[Sequence[tuple[int, float]]], tokens: int, vocab_size: int) -> None:
    """`check_chunk` for the top logprobs of a chunk of so many `tokens`, which most chunks do not have."""
    if len(tops) != tokens:
        raise EngineFailed(f"the engine gave {len(tops)} lists of top logprobs for {tokens} tokens")
    for token, logprob in chain.from_iterable(tops):
        if type(token) is not int or type(logprob) not in (float, int):
            raise EngineFailed("the engine gave a top logprob that is no token id with a number")
        if not 0 <= token < vocab_size:
            raise EngineFailed(f"the engine gave a top logprob of token {token}, which the model does not have")
        if logprob != logprob:
            raise EngineFailed("the engine's answer is wrong: a top logprob is NaN")
        if logprob > LARGEST_LOGPROB:
            raise EngineFailed("the engine's answer is wrong: a top logprob is above 0")


def _check_versions(runs: VersionRuns) -> None:
    """`check_chunk` for runs of weight versions."""
    for count, version in runs:
        if not 0 <= version <= LARGEST_VERSION:
            raise EngineFailed(f"the engine gave weight version {version}, which is not in 0 .. {LARGEST_VERSION}")
        if count < 1:
            raise EngineFailed("the engine gave a run of corrected versions with fewer than one token")
