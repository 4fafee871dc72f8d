"""What a wire protocol is: pure functions between bytes of one API and the shared nouns. No protocol knows another.

Unknown fields are accepted; what is known and cannot be done is refused by name; a failure never ends a stream cleanly.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.errors import ProxyError
from proxy.rendering.deltas import Delta, TokenLogprob
from proxy.types import Api, Interaction, TurnRequest

# Not the system's source of randomness: asking that lets other threads in, and costs a turn more than its parsing. Ids
# are no secrets.
_ids = random.Random()


def new_hex() -> str:
    """32 hex digits that no other id of this kind has."""
    return f"{_ids.getrandbits(128):032x}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one reply; `cached_tokens` of the prompt, `reasoning_tokens` of the completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


def usage_of(interaction: Interaction) -> Usage:
    return Usage(
        prompt_tokens=interaction.prompt_tokens,
        completion_tokens=len(interaction.output_ids),
        cached_tokens=interaction.cached_tokens or 0,
        reasoning_tokens=interaction.reasoning_tokens,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """One committed choice of a reply; `logprobs` of its visible tokens where the request asks for them."""

    interaction: Interaction
    logprobs: tuple[TokenLogprob, ...] | None = None


class StreamEncoder(Protocol):
    """One reply as stream bytes. Calls come in order: start, delta*, then finish or error."""

    def start(self) -> bytes:
        """What goes out before the first delta."""

    def delta(self, delta: Delta, choice: int = 0) -> bytes:
        """One piece of the answer; several choices only where the request has `n` above 1."""

    def keepalive(self) -> bytes:
        """Something that every client skips."""

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """The end of the reply; only called once its interactions are committed."""

    def error(self, error: ProxyError) -> bytes:
        """A failure after the stream began; the connection closes after it."""


class WireProtocol(Protocol):
    """One API."""

    api: Api

    def parse(self, body: Any) -> TurnRequest:
        """The request in a decoded JSON body. Raises InvalidRequest naming the field."""

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """The unary reply; one answer for each of `n` choices."""

    def stream(self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int) -> StreamEncoder:
        """An encoder for one streamed reply; `created` in Unix seconds."""

    def new_id(self) -> str:
        """An id for a reply, in this API's style."""
