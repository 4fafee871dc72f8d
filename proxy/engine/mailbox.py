"""No engine: requests wait until somebody outside fetches them and delivers an answer, as token ids or as text.

Fetching takes nothing away: until an answer is delivered the request can be fetched again, so a lost poll loses
nothing. A request is answered once: a second delivery is refused.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest, check_request
from proxy.errors import EngineFailed, EngineIncapable, EngineUnavailable, InvalidRequest, NotFound, ProxyError
from proxy.types import FinishReason, Ids, Logprobs, ids_of

_REMEMBERED_ANSWERS = 65_536
_MISSING = frozenset({Capability.RELEASE_MEMORY, Capability.TOP_LOGPROBS, Capability.STREAMING})


@dataclass(slots=True, eq=False)
class Letter:
    """A request that waits for its answer. `fetched` is when it was last handed out, in order; 0: never."""

    request: GenerateRequest
    number: int
    answer: asyncio.Future[TokenChunk]
    fetched: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """An answer from outside: text, or ids with a logprob each. `finish` None: as the ids say."""

    text: str | None = None
    output_ids: Ids = field(default_factory=ids_of)
    logprobs: Logprobs | None = None
    version: int | None = None
    finish: FinishReason | None = None


class Mailbox:
    """Implements `proxy.engine.interface.Engine`; `fetch` and `deliver` are for who answers."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        self._vocab_size, self._context_length = vocab_size, context_length
        self._letters: dict[str, Letter] = {}
        self._answered: dict[str, None] = {}
        self._numbers = itertools.count(1)
        self._arrived = asyncio.Condition()
        self._version = 0
        self._closed = False
        self.polls = 0
        """How many polls wait for a request."""

    @property
    def waiting(self) -> int:
        """How many requests wait for their answer."""
        return len(self._letters)

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The answer that is delivered, in one chunk. Raises what was delivered as an error."""
        check_request(request, self._vocab_size, self._context_length)
        if self._closed:
            raise EngineUnavailable("the mailbox is closed")
        letter = Letter(request, next(self._numbers), asyncio.get_running_loop().create_future())
        self._letters[request.request_id] = letter
        try:
            async with self._arrived:
                self._arrived.notify_all()
            yield await letter.answer
        finally:
            if self._letters.get(request.request_id) is letter:
                del self._letters[request.request_id]
            if not letter.answer.cancel() and not letter.answer.cancelled():
                letter.answer.exception()  # an error that came just when its agent left is no news to anybody

    async def fetch(self, session_id: str | None, wait_s: float, ended: asyncio.Event | None = None) -> Letter | None:
        """The oldest request of a session that waits, of all sessions the one not handed out for the longest time.

        None after `wait_s` seconds without one, or as soon as `ended` is set. Of those that wait for any request each
        that arrives goes to one: another that asks anew, or whose wait ends, may get it too, for the first may be lost.
        """
        ending = asyncio.create_task(self._notice(ended)) if ended is not None else None
        self.polls += 1
        try:
            async with asyncio.timeout(wait_s), self._arrived:
                letter = self._next(session_id)
                while letter is None:
                    if ended is not None and ended.is_set():
                        return None
                    await self._arrived.wait()
                    letter = self._next(session_id, untouched=session_id is None)
                return self._hand_out(letter)
        except TimeoutError:
            return self._hand_out(self._next(session_id))
        finally:
            self.polls -= 1
            if ending is not None:
                ending.cancel()

    def _hand_out(self, letter: Letter | None) -> Letter | None:
        if letter is not None:
            letter.fetched = next(self._numbers)
        return letter

    def find(self, session_id: str, turn: int) -> str:
        """The id of the request that is turn `turn` of a session. Raises NotFound, InvalidRequest where several are."""
        of_session = (letter.request for letter in self._letters.values() if letter.request.session_id == session_id)
        found = [request.request_id for request in of_session if request.turn_number == turn]
        if not found:
            raise NotFound(f"no request of session {session_id!r} waits as turn {turn}", param="turn")
        if len(found) > 1:  # a number is free again once its turn has failed
            raise InvalidRequest(f"{len(found)} requests wait as turn {turn}; name the 'request_id'", param="turn")
        return found[0]

    def deliver(self, request_id: str, delivery: Delivery | ProxyError) -> None:
        """Answer a request. Raises NotFound, InvalidRequest for a second answer or one that does not fit."""
        letter = self._letters.get(request_id)
        if letter is None or letter.answer.done():
            if letter is not None or request_id in self._answered:
                raise InvalidRequest(f"request {request_id!r} was answered already", param="request_id")
            raise NotFound(f"no request {request_id!r} waits; its agent may have left", param="request_id")
        if isinstance(delivery, ProxyError):
            letter.answer.set_exception(delivery)
        else:
            letter.answer.set_result(self._chunk(letter.request, delivery))
        self._answered[request_id] = None
        if len(self._answered) > _REMEMBERED_ANSWERS:
            del self._answered[next(iter(self._answered))]

    async def abort(self, request_id: str) -> None:
        """End a request with `FinishReason.ABORT`; unknown ids are ignored."""
        letter = self._letters.get(request_id)
        if letter is not None and not letter.answer.done():
            letter.answer.set_result(TokenChunk(ids_of(), Logprobs("f"), self._version, FinishReason.ABORT))

    async def pause(self, mode: PauseMode) -> None:
        """Nothing: requests wait anyway, and stay where they can be answered."""

    async def resume(self) -> None:
        """Nothing was stopped."""

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """There are no weights here; answers without a version carry the new one from now on."""
        self._version = self._version + 1 if version is None else version
        return self._version

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        raise EngineIncapable(f"the mailbox has no weights for {step.value}")

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        raise EngineIncapable("the mailbox holds no memory that it could release")

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        raise EngineIncapable("the mailbox holds no memory that it could release")

    async def flush_cache(self) -> None:
        """No cache."""

    def info(self) -> EngineInfo:
        """What can be asked for: who answers gets the whole request, tools and sampling included, and may honour it."""
        return EngineInfo(
            name="mailbox",
            model="mailbox",
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            weight_version=self._version,
            capabilities=frozenset(Capability) - _MISSING,
            detail=f"POST /mailbox/next and /mailbox/deliver: {self.waiting} requests wait, {self.polls} polls",
        )

    async def close(self) -> None:
        """End every request that waits."""
        self._closed = True
        for request_id in list(self._letters):
            await self.abort(request_id)

    def _next(self, session_id: str | None, untouched: bool = False) -> Letter | None:
        waiting = [
            letter
            for letter in self._letters.values()
            if not letter.answer.done() and not (untouched and letter.fetched)
        ]
        if session_id is not None:
            of_session = [letter for letter in waiting if letter.request.session_id == session_id]
            return min(of_session, key=lambda letter: letter.number, default=None)
        return min(waiting, key=lambda letter: (letter.fetched, letter.number), default=None)

    async def _notice(self, ended: asyncio.Event) -> None:
        await ended.wait()
        async with self._arrived:
            self._arrived.notify_all()

    def _chunk(self, request: GenerateRequest, delivery: Delivery) -> TokenChunk:
        version = self._version if delivery.version is None else delivery.version
        if delivery.text is not None:
            if request.turn is None:  # nobody reads or encodes text there
                raise InvalidRequest("this request has no messages, only ids: answer with 'output_ids'", param="text")
            finish = delivery.finish or FinishReason.STOP
            return TokenChunk(ids_of(), Logprobs("f"), version, finish, text=delivery.text)
        ids = delivery.output_ids
        most = request.sampling.max_tokens
        if most is not None and len(ids) > most:
            raise InvalidRequest(f"'output_ids' has {len(ids)} ids, the request asked for {most}", param="output_ids")
        if any(token >= self._vocab_size for token in ids):
            raise InvalidRequest(f"'output_ids' has an id beyond the {self._vocab_size} known", param="output_ids")
        told = delivery.logprobs
        if told is not None and len(told) != len(ids):
            raise InvalidRequest(f"'logprobs' has {len(told)} values for {len(ids)} ids", param="logprobs")
        stops = bool(ids) and ids[-1] in request.stop_token_ids
        finish = delivery.finish or (FinishReason.STOP if stops or len(ids) != most else FinishReason.LENGTH)
        if told is None:
            return TokenChunk(ids, array("f", bytes(4 * len(ids))), version, finish, sampled=False)
        return TokenChunk(ids, told, version, finish)


def failure(message: str) -> ProxyError:
    """What an agent gets when who answers could not."""
    return EngineFailed(message)
