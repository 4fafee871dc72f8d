"""The place of a request in its trace, in terms of W3C Trace Context, for log lines, engine servers and links."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span of a request. `trace_id` has 128 bits, `span_id` 64; `flags` and `state` as in the W3C headers.

    `promised`: the ids that the spans of generations will have, by turn. They are sent to engine servers before the
    spans are created.
    """

    trace_id: int
    span_id: int
    flags: int
    state: str = ""
    promised: dict[str, int] = field(default_factory=dict)

    @property
    def hex_id(self) -> str:
        """The trace id in 32 hex digits."""
        return f"{self.trace_id:032x}"

    def headers(self, turn_id: str) -> dict[str, str]:
        """The headers with which an engine server makes its spans children of the generation of a turn."""
        span_id = self.promised.setdefault(turn_id, random.getrandbits(64) or 1)
        headers = {"traceparent": f"00-{self.hex_id}-{span_id:016x}-{self.flags:02x}"}
        if self.state:
            headers["tracestate"] = self.state
        return headers
