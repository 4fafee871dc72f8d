"""Scripts for `ScriptedEngine`: a function that maps each request to the reply that the engine then plays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from proxy.engine.requests import GenerateRequest
from proxy.errors import EngineFailed
from proxy.types import FinishReason, Ids, ids_of


class Fault(StrEnum):
    """What goes wrong after `Reply.fault_after` tokens: error, end without a finish, too few logprobs, silence."""

    ERROR = "error"
    CUT = "cut"
    BAD_LENGTHS = "bad_lengths"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted answer. `ids` as sampled, the end token included where there is one.

    `finish` None: stop when the last id is a stop token of the request, else length. `chunk` tokens go out at once.
    """

    ids: Ids
    chunk: int = 1
    delay_s: float = 0.0
    finish: FinishReason | None = None
    fault: Fault | None = None
    fault_after: int = 0
    version: int | None = None


Script = Callable[[GenerateRequest], Reply]


def play(replies: Iterable[Reply]) -> Script:
    """A script that gives `replies` in order, one a request, and then fails."""
    rest: Iterator[Reply] = iter(replies)

    def script(request: GenerateRequest) -> Reply:
        reply = next(rest, None)
        if reply is None:
            raise EngineFailed("the script has no reply left")
        return reply

    return script


def babble(length: int, vocab_size: int, chunk: int, delay_s: float = 0.0) -> Script:
    """A script of `length` tokens that differ with the prompt, without end token; `max_tokens` cuts them.

    Ids stay in the lower half of the vocabulary, where byte-level tokenizers have plain text and no markers.
    """
    span = max(vocab_size // 2, 1)

    def script(request: GenerateRequest) -> Reply:
        start = (len(request.input_ids) * 31 + request.input_ids[-1]) % span
        ids = ids_of((start + 7 * step) % span for step in range(length))
        return Reply(ids, chunk, delay_s)

    return script
