"""Sampled tokens as an engine hands them over, and the check that every chunk passes first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxy.engine.versions import LARGEST_VERSION
from proxy.errors import EngineFailed
from proxy.types import FinishReason, Ids, Logprobs, VersionRuns


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One or more sampled tokens, in order. `finish` is set on the last chunk only, which may hold no tokens.

    `logprobs` are natural logs by the rule of the design's section 8, one per id. `top_logprobs` has one tuple of
    (token id, logprob) per id, highest first, and is empty when not asked for. `version` sampled all of `ids`.
    `cached_tokens` is how many prompt tokens came from a prefix cache, when the engine says so. `text` is an answer
    that came as text instead of ids: the turn encodes it. `sampled` False: no logprobs are known, and zeros stand in.
    `corrected` are runs (count, version) of the tokens right before this chunk where earlier chunks said otherwise: an
    engine may know only at the end which weights sampled them. A chunk with it may hold no tokens.
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


def check_chunk(chunk: TokenChunk) -> None:
    """Raises EngineFailed for a chunk that nothing can be done with, whoever wrote the engine."""
    if len(chunk.ids) != len(chunk.logprobs):
        raise EngineFailed(f"the engine gave {len(chunk.logprobs)} logprobs for {len(chunk.ids)} tokens")
    if not all(map(math.isfinite, chunk.logprobs)):
        raise EngineFailed("the engine gave a logprob that is not a finite number")
    for version in (chunk.version, *(version for _, version in chunk.corrected)):
        if not 0 <= version <= LARGEST_VERSION:
            raise EngineFailed(f"the engine gave weight version {version}, which is not in 0 .. {LARGEST_VERSION}")
    if any(count < 1 for count, _ in chunk.corrected):
        raise EngineFailed("the engine corrected the versions of less than one token")
