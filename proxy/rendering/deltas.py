"""Deltas: the pieces of an assistant message that an output parser produces. The joined deltas give the message.

Deltas are never modified. The two that are made for single tokens are not frozen: they are made almost three times
faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.types import Ids


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token with its logprob (natural log). `top`: the most likely tokens at its position, best first."""

    text: str
    utf8: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class TextDelta:
    """A piece of the visible answer. `logprobs`: of the tokens not yet reported, if the request asks for logprobs."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class ReasoningDelta:
    """A piece of the reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call; `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments of call `index`, as JSON text."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The end of call `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class TokensDelta:
    """Sampled tokens, whatever they become in the message, with their `logprobs` if the request asks for logprobs.

    Only requests with `per_token` get them. They precede the pieces of the message that they complete.
    """

    ids: Ids
    logprobs: tuple[TokenLogprob, ...] = ()


Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd | TokensDelta
"""One piece of an assistant message."""
