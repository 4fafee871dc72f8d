"""Determines whether another replica has sent the reply to an equal earlier request.

An equal request is a retry if the client never got the reply, or a new sample if it did. The replica that sends a reply
notes in the store that it was written. Until then, or until `WRITING_S` have passed, the answer is unknown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence

from proxy.sessions.attempts import Attempt
from proxy.sessions.live_session import LiveSession
from proxy.store.replica_news import ReplicaNews

# How long after its commit a live replica may still be sending a reply. A reply that is not noted as written within
# this time was never sent.
WRITING_S = 2.0
# The interval at which the notes are read. A note follows its reply within about 50 ms.
_SETTLE_S = 0.02


async def settle(news: ReplicaNews, session: LiveSession, request_hash: str) -> None:
    """Wait until it is known whether the replies to equal earlier requests were sent, at most about `WRITING_S`."""
    while unsettled := [a for a in session.attempts.get(request_hash, ()) if a.unsettled]:
        if not note_written(unsettled, await news.load_unreplied(session.id)):
            await asyncio.sleep(_SETTLE_S)


def note_written(attempts: Sequence[Attempt], unreplied: Collection[str]) -> bool:
    """Set `written` and `unsettled` of attempts; return True if all are settled.

    `unreplied`: ids of the interactions whose reply is not noted as written.
    """
    since = time.time() - WRITING_S
    for attempt in attempts:
        attempt.written = attempt.written or not any(i.id in unreplied for i in attempt.interactions)
        late = all((i.completed_at or 0.0) < since for i in attempt.interactions)
        attempt.unsettled = not (attempt.written or late)
    return not any(attempt.unsettled for attempt in attempts)
