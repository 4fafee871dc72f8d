"""The bytes of all request bodies that a server holds at once.

A body takes its room when more than a little of it has arrived, and gives it back when what was made of it is used.
Nobody can hold all of it: a small body takes nothing, one sender gets at most half, and while others wait for room, an
upload has some seconds to arrive.
"""

from __future__ import annotations

import asyncio

from proxy.resources.fair_queue import FairQueue
from proxy.resources.senders import Sender, Tally
from tokengrove.errors import TooManyRequests

FREE = 64 * 1024
"""A body of so many bytes takes nothing. uvicorn reads about as much of each body before anybody asks for it."""

# A request waits so long for others to end. SDKs send it again after a 429.
_WAIT_S = 30.0
# While others wait, an upload that has not arrived so long after it got its room is given up.
_ARRIVAL_S = 3.0
_LOOK_S = 0.5


class BodyBudget:
    """`most` bytes in all. Use it on one event loop."""

    def __init__(self, most: int, bytes_of: Tally) -> None:
        self.most = most
        self._bytes = bytes_of
        self._shares: set[Share] = set()
        self._waiting: FairQueue[Share] = FairQueue()
        self._looking = False

    @property
    def held(self) -> int:
        """How many bytes are taken."""
        return self._bytes.total

    async def take(self, share: Share) -> None:
        """Take the room of a share once it is free, in turn by sender. Raises TooManyRequests after half a minute."""
        if not self._take(share):
            self._waiting.put(share.sender, share)
            self._look_later()
            try:
                async with asyncio.timeout(_WAIT_S):
                    await share.taken
            except TimeoutError:
                raise self.full() from None
            finally:
                self._waiting.discard(share.sender, share)

    def arrived(self, share: Share, size: int) -> None:
        """Note that a body has arrived whole, and give back the room that it did not need."""
        share.since = None
        self._give_back(share, share.size - size)

    def release(self, share: Share) -> None:
        """Give back the room of a share, if it has any."""
        if share in self._shares:
            self._shares.remove(share)
            self._give_back(share, share.size)

    def full(self) -> TooManyRequests:
        """The error of a request that finds no room."""
        return TooManyRequests(
            f"the bodies of other requests fill the {self.most} bytes that the server has for them, half of it for "
            "one sender (--max-inflight-body-bytes); send the request again",
            retry_after_s=1.0,
        )

    def _take(self, share: Share) -> bool:
        if not (self._is_within_half(share) and self.held + share.size <= self.most):
            return False
        self._bytes.add(share.sender, share.size)
        self._shares.add(share)
        share.since = asyncio.get_running_loop().time()
        if not share.taken.done():  # else its request was cancelled, and releases it
            share.taken.set_result(None)
        return True

    def _is_within_half(self, share: Share) -> bool:
        return self._bytes.of.get(share.sender, 0) + share.size <= self.most // 2

    def _give_back(self, share: Share, size: int) -> None:
        share.size -= size
        self._bytes.add(share.sender, -size)
        while self._waiting.take(self._take) is not None:
            pass

    def _look_later(self) -> None:
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Give up the uploads that are late, if somebody waits for their room."""
        self._looking = False
        if not self._waiting:
            return
        late = asyncio.get_running_loop().time() - _ARRIVAL_S
        any_room = any(map(self._is_within_half, self._waiting))
        senders = {share.sender for share in self._waiting}
        for share in self._shares:
            if share.since is not None and share.since <= late and (any_room or share.sender in senders):
                share.give_up()
        self._look_later()


class Share:
    """The room of one body. `sender`: who sends it. `size`: in bytes. `since`: when it got its room; None before that,
    and once the body has arrived."""

    __slots__ = ("_cancels", "_given_up", "_task", "sender", "since", "size", "taken")

    def __init__(self, sender: Sender, size: int) -> None:
        """The share of the body that the current task reads."""
        task = asyncio.current_task()
        assert task is not None
        self.sender, self.size = sender, size
        self.since: float | None = None
        self.taken: asyncio.Future[None] = task.get_loop().create_future()
        self._given_up, self._task, self._cancels = False, task, task.cancelling()

    def give_up(self) -> None:
        """Cancel the task that reads the body, which then asks whether it `was_given_up`."""
        self.since = None
        self._given_up = self._task.cancel()

    def was_given_up(self) -> bool:
        """Whether the cancellation that the task has caught is this one, and no other has come with it."""
        return self._given_up and self._task.uncancel() <= self._cancels
