"""The pieces that an output parser makes of sampled tokens; joined, they are the output message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token with its logprob (natural) and, in `top`, the likeliest ones in its place, highest first."""

    text: str
    utf8: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the visible answer. `logprobs` are of tokens not yet reported, where the request asks for them."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of the arguments of call `index`."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Call `index` is closed."""

    index: int


Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
"""What an output parser makes of sampled tokens; the same, joined, is the output message."""
