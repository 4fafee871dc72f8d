"""The number of tokens that an engine sends in one part of a reply: few if a client reads them, many otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.engine.requests import GenerateRequest

_UNSTREAMED_INTERVAL = 32
"""Tokens per part of unstreamed replies: a thirtieth of the overhead, and stop strings still end a reply soon."""

_STREAMS_PER_TOKEN = 64
_LARGEST_INTERVAL = 3


@dataclass(slots=True)
class Streams:
    """The streamed replies in progress, which determine how many tokens the engine sends in a part.

    The first token of a reply comes immediately, whatever the interval. With many streams, parts of single tokens cost
    too much: from 64 streams on, a new stream gets two tokens per part, and from 128 on, three. `given`: the setting
    `--stream-interval`, which overrides this. `running`: the number of streamed replies.
    """

    given: int | None = None
    running: int = 0

    def interval(self, request: GenerateRequest) -> int:
        """Tokens per part of a reply: 32 if the client does not stream."""
        if not request.streamed:
            return _UNSTREAMED_INTERVAL
        return self.given or min(1 + self.running // _STREAMS_PER_TOKEN, _LARGEST_INTERVAL)
