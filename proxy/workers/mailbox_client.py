"""The mailbox of a worker that does not lead. Its requests wait in the leader's mailbox, from which all are fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from proxy.engine.chunks import TokenChunk
from proxy.engine.mailbox import Mailbox
from proxy.engine.requests import GenerateRequest, check_request
from proxy.workers.leader import LEADER
from proxy.workers.peers import Peers, Unreachable

_AGAIN_S = 0.2
"""Seconds between attempts to reach a leader that is being restarted."""


class MailboxClient(Mailbox):
    """A mailbox that forwards its requests to the leader and has no letters of its own."""

    def __init__(self, vocab_size: int, context_length: int, peers: Peers) -> None:
        super().__init__(vocab_size, context_length)
        self._limits, self._peers = (vocab_size, context_length), peers

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the answer that is delivered to the leader. Submit the request again whenever the leader is lost."""
        check_request(request, *self._limits)
        while True:
            try:
                yield await self._peers.ask(LEADER, "submit", request)
                return
            except Unreachable:
                await asyncio.sleep(_AGAIN_S)
