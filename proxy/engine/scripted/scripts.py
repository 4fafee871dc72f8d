"""Scripts for `ScriptedEngine`: functions that map each request to the reply that the engine plays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from proxy.engine.requests import GenerateRequest
from proxy.types import Ids, ids_of
from tokengrove.errors import EngineFailed
from tokengrove.reasons import FinishReason, LogprobsOf


class Fault(StrEnum):
    """A failure to simulate after `Reply.fault_after` tokens.

    ERROR: the engine raises EngineFailed. CUT: the reply ends without a finish reason. BAD_LENGTHS: all chunks lack one
    logprob, from the first chunk on. HANG: no token comes; on abort the reply ends without a finish reason.
    """

    ERROR = "error"
    CUT = "cut"
    BAD_LENGTHS = "bad_lengths"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted reply: `ids` as if sampled, with the end token if there is one.

    `chunk`: tokens per chunk. `delay_s`: seconds before each chunk. `finish` None: stop if the last id is a stop token
    of the request, else length. `version` None: the engine's weight version. `logprobs_of`: of its
    chunks; it changes no logprob.
    """

    ids: Ids
    chunk: int = 1
    delay_s: float = 0.0
    finish: FinishReason | None = None
    fault: Fault | None = None
    fault_after: int = 0
    version: int | None = None
    logprobs_of: LogprobsOf = LogprobsOf.RULE


Script = Callable[[GenerateRequest], Reply]
"""Maps a request to the reply that the engine plays."""


def play(replies: Iterable[Reply]) -> Script:
    """A script that returns `replies` in order, one per request, and raises EngineFailed after the last."""
    rest: Iterator[Reply] = iter(replies)

    def script(request: GenerateRequest) -> Reply:
        reply = next(rest, None)
        if reply is None:
            raise EngineFailed("the script has no reply left")
        return reply

    return script


def babble(length: int, vocab_size: int, chunk: int, delay_s: float = 0.0) -> Script:
    """A script of `length` tokens that depend on the prompt and its images, without an end token.

    Ids stay in the lower half of the vocabulary, where byte-level tokenizers have plain text and no markers.
    """
    span = max(vocab_size // 2, 1)
    steps = 7 * np.arange(length)

    def script(request: GenerateRequest) -> Reply:
        start = (len(request.prompt) * 31 + request.prompt.tail(1)[0]) % span
        if request.images is not None:
            start = (start + sum(int(image.digest[:8], 16) for image in request.images.placed)) % span
        ids = ids_of(((start + steps) % span).astype(np.int32).tobytes())
        return Reply(ids, chunk, delay_s)

    return script
