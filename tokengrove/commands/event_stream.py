"""The events of a server that may restart: `tokengrove watch` follows it until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokengrove.client import Client, ServerEvent
    from tokengrove.client.server_events import EventKind

AGAIN_S = 2.0
"""Seconds between two attempts to connect, as in the server's `retry`."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The stream has begun. Anything shown earlier may be out of date."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream broke or ended; `follow` reconnects."""

    why: str


def follow(
    client: Client,
    kinds: Collection[EventKind] | None = None,
    *,
    wait: Callable[[float], object] = time.sleep,
) -> Iterator[ServerEvent | Connected | Lost]:
    """Yield the events, and the beginnings and breaks of the stream, for ever.

    Raises the server's error if it refuses the call (for example, a wrong key), and ServerUnreachable if the first
    attempt fails.
    """
    from tokengrove.client import ServerUnreachable
    from tokengrove.errors import StoreUnavailable, TooManyRequests

    heard = lost = False
    while True:
        why = "the server closed the connection"
        begun = False
        try:
            for event in client.events(kinds):
                if not begun:
                    begun, heard, lost = True, True, False
                    yield Connected()
                yield event
        except (ServerUnreachable, StoreUnavailable, TooManyRequests) as error:
            if not heard:
                raise
            why = error.message
        if not lost:
            lost = True
            yield Lost(why)
        wait(AGAIN_S)
