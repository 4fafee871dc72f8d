"""The bytes of all request bodies that a server holds at once.

A body takes its share when more than a little of it has arrived, and releases it when its values are used. No client
can hold the whole budget: a small body takes nothing, one sender gets at most half, and while others wait, an upload
must arrive within a few seconds.
"""

from __future__ import annotations

import asyncio

from proxy.resources.fair_queue import FairQueue
from proxy.resources.senders import Sender, Tally
from tokengrove.errors import TooManyRequests

FREE = 64 * 1024
"""A body of at most this many bytes takes nothing. uvicorn reads about as much of each body in advance."""

# How long a request waits for others to end. SDKs retry it after a 429.
_WAIT_S = 30.0
# While others wait, an upload is cancelled if it has not arrived this long after it got its share.
_ARRIVAL_S = 3.0
_LOOK_S = 0.5


class BodyBudget:
    """A budget of `most` bytes in total. Use it on one event loop."""

    def __init__(self, most: int, bytes_of: Tally) -> None:
        self.most = most
        self._bytes = bytes_of
        self._shares: set[Share] = set()
        self._waiting: FairQueue[Share] = FairQueue()
        self._looking = False

    @property
    def held(self) -> int:
        """The number of bytes taken."""
        return self._bytes.total

    async def take(self, share: Share) -> None:
        """Wait for the bytes of a share, fair by sender, and take them. Raises TooManyRequests after half a minute."""
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
        """Note that a body has arrived completely, and release the bytes that it did not need."""
        share.since = None
        self._give_back(share, share.size - size)

    def release(self, share: Share) -> None:
        """Release the bytes of a share, if it has any."""
        if share in self._shares:
            self._shares.remove(share)
            self._give_back(share, share.size)

    def full(self) -> TooManyRequests:
        """The error for a request that gets no share."""
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
        """Cancel late uploads if other requests wait for their bytes."""
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
    """The share of one body. `size`: in bytes. `since`: when it was taken; None before, and after the body arrived."""

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
        """Cancel the task that reads the body, which then checks `was_given_up`."""
        self.since = None
        self._given_up = self._task.cancel()

    def was_given_up(self) -> bool:
        """Whether the cancellation that the task has caught is from `give_up` alone."""
        return self._given_up and self._task.uncancel() <= self._cancels
