"""The mailbox engine: an external worker fetches requests and delivers their answers, as token ids or as text.

Fetching does not consume: a request can be fetched again until it is answered, so a lost poll loses nothing. A request
can be answered only once.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest, check_request
from proxy.types import Ids, Logprobs, ids_of
from tokengrove.errors import (
    EngineFailed,
    EngineIncapable,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    ProxyError,
    brief,
)
from tokengrove.reasons import FinishReason

_REMEMBERED_ANSWERS = 65_536
_MISSING = frozenset(
    {
        *(Capability.TOP_LOGPROBS, Capability.STREAMING, Capability.DETERMINISTIC, Capability.ADAPTERS),
        *(Capability.PROMPT_LOGPROBS, Capability.PROMPT_TEMPERATURE),
    }
)


@dataclass(slots=True, eq=False)
class Letter:
    """A request that waits for its answer.

    `number`: the order of arrival. `fetched`: the order of the last fetch, on the same counter; 0 if never fetched.
    """

    request: GenerateRequest
    number: int
    answer: asyncio.Future[TokenChunk]
    fetched: int = 0


@dataclass(frozen=True, slots=True)
class Delivery:
    """A worker's answer: `text`, or `output_ids`, with or without one logprob per id.

    `version`: the weight version; None for the mailbox's own. `finish` None: derived from the ids. `given_as`: the
    field that `output_ids` came from, for errors. `counted_elsewhere`: `output_ids` encode an answer of another model,
    which counted its own tokens, so that `max_tokens` does not apply to them.
    """

    text: str | None = None
    output_ids: Ids = field(default_factory=ids_of)
    logprobs: Logprobs | None = None
    version: int | None = None
    finish: FinishReason | None = None
    given_as: str = "output_ids"
    counted_elsewhere: bool = False


class Mailbox:
    """Implements `proxy.engine.interface.Engine`; the external worker calls `fetch`, `find` and `deliver`."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        self._vocab_size, self._context_length = vocab_size, context_length
        self._letters: dict[str, Letter] = {}
        self._answered: dict[str, None] = {}
        self._numbers = itertools.count(1)
        self._arrived = asyncio.Condition()
        self._version = 0
        self._closed = False
        self.leads, self.busy_elsewhere = True, False
        self.polls = 0
        """The number of calls of `fetch` that wait for a request."""

    @property
    def waiting(self) -> int:
        """The number of requests that wait for an answer."""
        return len(self._letters)

    async def start(self) -> None:
        """Do nothing: there is no model to load."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the delivered answer as one chunk. Raises the error if the worker delivered one."""
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
                letter.answer.exception()  # mark an error that came while the agent disconnected as retrieved

    async def fetch(self, session_id: str | None, wait_s: float, ended: asyncio.Event | None = None) -> Letter | None:
        """Return a waiting request: the oldest of the session, or the least recently fetched of all sessions.

        Returns None after `wait_s` seconds without a request, or as soon as `ended` is set. Among polls that wait for a
        request of any session, each new request is returned to only one. A later poll, or a poll that times out, may
        get the same request again, since the first worker may have failed.
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
        """Return the id of the request that waits as turn `turn`. Raises NotFound; InvalidRequest if several do."""
        of_session = (letter.request for letter in self._letters.values() if letter.request.session_id == session_id)
        found = [request.request_id for request in of_session if request.turn_number == turn]
        if not found:
            raise NotFound(f"no request of session {brief(session_id)} is waiting as turn {turn}", param="turn")
        if len(found) > 1:  # the number of a failed turn is reused
            raise InvalidRequest(
                f"{len(found)} requests are waiting as turn {turn}; give 'interaction_id' instead", param="turn"
            )
        return found[0]

    def request(self, request_id: str) -> GenerateRequest:
        """Return a waiting request. Raises NotFound, or InvalidRequest if it is already answered."""
        return self._waiting(request_id).request

    def deliver(self, request_id: str, delivery: Delivery | ProxyError) -> None:
        """Answer a request. Raises NotFound, or InvalidRequest for a second answer or an answer that does not fit."""
        letter = self._waiting(request_id)
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
        """Do nothing: the worker samples, and requests can still be answered during a pause."""

    async def resume(self) -> None:
        """Do nothing: `pause` stops nothing."""

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Set the version of answers that do not name one. The mailbox has no weights, so `path` is not read."""
        self._version = self._version + 1 if version is None else version
        return self._version

    def common(self) -> dict[str, Any]:
        """The version."""
        return {"version": self._version}

    async def adopt(self, common: Mapping[str, Any]) -> None:
        """Adopt the version of another process."""
        self._version = common["version"]

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Raises EngineIncapable: there are no weights."""
        raise EngineIncapable(f"the mailbox has no weights for {step.value}")

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Do nothing: the worker has the memory. A trainer's sleep is only a pause here."""

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Do nothing: no memory was released."""

    async def flush_cache(self) -> None:
        """Do nothing: there is no cache."""

    def info(self) -> EngineInfo:
        """Facts about the engine. Workers receive all sampling parameters, so it has most capabilities.

        How a worker uses a seed is up to the worker.
        """
        return EngineInfo(
            name="mailbox",
            model="mailbox",
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            weight_version=self._version,
            capabilities=frozenset(Capability) - _MISSING,
            detail=f"POST /mailbox/next and /mailbox/deliver: {self.waiting} requests waiting, {self.polls} polls",
        )

    async def close(self) -> None:
        """End every waiting request with `FinishReason.ABORT`."""
        self._closed = True
        for request_id in list(self._letters):
            await self.abort(request_id)

    def _waiting(self, request_id: str) -> Letter:
        letter = self._letters.get(request_id)
        if letter is not None and not letter.answer.done():
            return letter
        if letter is not None or request_id in self._answered:
            raise InvalidRequest(f"request {brief(request_id)} is answered already", param="interaction_id")
        raise NotFound(
            f"no request {brief(request_id)} is waiting; its agent may have disconnected", param="interaction_id"
        )

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
            if request.turn is None:  # no turn encodes text here
                raise InvalidRequest(
                    "this request has token ids and no messages; answer with 'output_ids' instead of 'text'",
                    param="text",
                )
            finish = delivery.finish or FinishReason.STOP
            return TokenChunk(ids_of(), Logprobs("f"), version, finish, text=delivery.text)
        ids = delivery.output_ids
        most = request.sampling.max_tokens
        if most is not None and len(ids) > most and not delivery.counted_elsewhere:
            raise InvalidRequest(
                f"'{delivery.given_as}' has {len(ids)} ids; the request allows at most {most} (max_tokens)",
                param=delivery.given_as,
            )
        if any(token >= self._vocab_size for token in ids):
            raise InvalidRequest(
                f"'output_ids' has an id outside of the vocabulary (0 to {self._vocab_size - 1})", param="output_ids"
            )
        told = delivery.logprobs
        if told is not None and len(told) != len(ids):
            raise InvalidRequest(f"'logprobs' has {len(told)} values for {len(ids)} 'output_ids'", param="logprobs")
        stops = bool(ids) and ids[-1] in request.stop_token_ids
        finish = delivery.finish or (FinishReason.STOP if stops or len(ids) != most else FinishReason.LENGTH)
        if told is None:
            return TokenChunk(ids, array("f", bytes(4 * len(ids))), version, finish, sampled=False)
        return TokenChunk(ids, told, version, finish)


def failure(message: str) -> ProxyError:
    """The error that an agent receives if the worker delivers a failure."""
    return EngineFailed(message)
