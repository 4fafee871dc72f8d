"""The interface of a wire protocol: pure translation between one API's JSON and the shared types.

Unknown fields are accepted. A known field that this server cannot honour is refused by name. A failed stream never ends
like a successful one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.parsed_items import ParsedBodies
from proxy.rendering.deltas import Delta, TokenLogprob
from proxy.types import Api, Ids, Interaction, TurnRequest
from tokengrove.errors import ProxyError

# Not `os.urandom`: its system call releases the GIL and costs more time per turn than parsing. Ids are not secrets.
_ids = random.Random()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_ids.seed)  # else all workers of a server would generate the same ids


def new_hex() -> str:
    """Return 32 random hex digits (128 bits) for a new id."""
    return f"{_ids.getrandbits(128):032x}"


def ordered_hex() -> str:
    """Return 32 hex digits for the id of a turn: the time in steps of about a millisecond, then 80 random bits.

    Turns that are committed together thus have neighbouring ids in the index of the database, and a commit changes one
    or two of its pages instead of one per turn.
    """
    return f"{time.time_ns() >> 20:012x}{_ids.getrandbits(80):020x}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one reply: `cached_tokens` is part of the prompt, `reasoning_tokens` part of the completion."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int


def usage_of(interaction: Interaction) -> Usage:
    """Return the token counts of `interaction`, or those that an external model told; unknown ones count as 0."""
    if interaction.external:
        return Usage(**{name: interaction.external.get(name) or 0 for name in Usage.__dataclass_fields__})
    return Usage(
        prompt_tokens=interaction.prefix_length + len(interaction.prompt_suffix),
        completion_tokens=len(interaction.output_ids),
        cached_tokens=interaction.cached_tokens or 0,
        reasoning_tokens=interaction.reasoning_tokens,
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """One committed choice of a reply.

    `logprobs`: the logprobs of its visible tokens (of all tokens if the request has `per_token`); None unless the
    request sets `logprobs`. `prompt_ids`: the whole prompt; None unless the request sets `return_token_ids`.
    `completion_text`: the output as the model wrote it; None unless the request sets `return_completion_text`.
    """

    interaction: Interaction
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_ids: Ids | None = None
    completion_text: str | None = None

    def text_json(self) -> dict[str, str]:
        """The reply field with the sampled text; empty unless the request sets `return_completion_text`."""
        return {} if self.completion_text is None else {"completion_text": self.completion_text}


class StreamEncoder(Protocol):
    """Encodes one reply as stream bytes, of the media type `content_type`.

    The order of calls is: `start`, any number of `deltas`, then `finish` or `error`; `keepalive` anywhere between.
    """

    content_type: str

    def start(self) -> bytes:
        """Return the bytes that precede the first delta."""

    def deltas(self, deltas: Sequence[Delta], choice: int = 0) -> bytes:
        """Encode pieces of the answer. `choice` counts from 0; it is above 0 only if the request's `n` is above 1."""

    def keepalive(self) -> bytes:
        """Return bytes that every client ignores."""

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """Return the end of the reply. The caller has already committed its interactions."""

    def error(self, error: ProxyError) -> bytes:
        """Encode a failure after the stream began. The caller then closes the connection."""


class WireProtocol(Protocol):
    """One API: parses its requests and writes its replies."""

    api: Api

    def parse(self, body: Any, bodies: ParsedBodies | None = None) -> TurnRequest:
        """Parse a decoded JSON body. Raises InvalidRequest naming the field.

        `bodies`: the parsed items of earlier bodies of the same session; they do not change the result.
        """

    def body(self, request: TurnRequest) -> dict[str, Any]:
        """Return a body from which `parse` makes `request`, as far as this API allows.

        `request` has its whole conversation, or `input_ids`. Its `given` sampling parameters are written even if they
        have their default values. Images in the body are `ImagePart`s (see `image_sources.with_data`).
        """

    def reply(self, request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the whole reply; `answers` has one item per choice (`n`)."""

    def stream(
        self, request: TurnRequest, reply_id: str, created: int, prompt_tokens: int, prompt_ids: Ids | None = None
    ) -> StreamEncoder:
        """Return an encoder for one streamed reply; `created` is in Unix seconds.

        `prompt_ids`: the whole prompt; None unless the request sets `return_token_ids`.
        """

    def new_id(self) -> str:
        """Return a new id for a reply, in this API's style."""
