"""An engine that plays what it is told, token for token: for tests, demonstrations and benchmarks.

Deterministic: the same script and the same prompts give the same ids, logprobs and faults.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest
from proxy.errors import ConfigurationError, EngineFailed, EngineIncapable, InvalidRequest
from proxy.types import FinishReason, Ids, ids_of

if TYPE_CHECKING:
    from proxy.engine.acting import Speech

_LOGPROB = math.log(0.5)


class Fault(StrEnum):
    """What goes wrong after `Reply.fault_after` tokens: error, end without a finish, too few logprobs, silence."""

    ERROR = "error"
    CUT = "cut"
    BAD_LENGTHS = "bad_lengths"
    HANG = "hang"


@dataclass(frozen=True, slots=True)
class Reply:
    """One scripted answer. `ids` as sampled, the end token included where there is one.

    `finish` None: stop when the last id is a stop token of the request, else length. `chunk` tokens go out at once.
    """

    ids: Ids
    chunk: int = 1
    delay_s: float = 0.0
    finish: FinishReason | None = None
    fault: Fault | None = None
    fault_after: int = 0
    version: int | None = None


Script = Callable[[GenerateRequest], Reply]


def play(replies: Iterable[Reply]) -> Script:
    """A script that gives `replies` in order, one a request, and then fails."""
    rest: Iterator[Reply] = iter(replies)

    def script(request: GenerateRequest) -> Reply:
        reply = next(rest, None)
        if reply is None:
            raise EngineFailed("the script has no reply left")
        return reply

    return script


def babble(length: int, vocab_size: int, chunk: int, delay_s: float = 0.0) -> Script:
    """A script of `length` tokens that differ with the prompt, without end token; `max_tokens` cuts them.

    Ids stay in the lower half of the vocabulary, where byte-level tokenizers have plain text and no markers.
    """
    span = max(vocab_size // 2, 1)

    def script(request: GenerateRequest) -> Reply:
        start = (len(request.input_ids) * 31 + request.input_ids[-1]) % span
        ids = ids_of((start + 7 * step) % span for step in range(length))
        return Reply(ids, chunk, delay_s)

    return script


class ScriptedEngine:
    """Plays `script`; keeps every request in `requests`, ended ones too, so that tests can look at what was sent."""

    def __init__(
        self, script: Script, *, vocab_size: int, context_length: int = 131_072, model: str = "scripted"
    ) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.keep_requests = True
        self._info = (vocab_size, context_length, model)
        self._version = 0
        self._running: dict[str, asyncio.Event] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def running(self) -> list[str]:
        """The ids of the requests that are being played."""
        return list(self._running)

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self._check(request)
        if self.keep_requests:
            self.requests.append(request)
        stopped = self._running[request.request_id] = asyncio.Event()
        try:
            async for chunk in self._play(self.script(request), request, stopped):
                yield chunk
        finally:
            del self._running[request.request_id]

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if (stopped := self._running.get(request_id)) is not None:
            stopped.set()

    async def pause(self, mode: PauseMode) -> None:
        self._resumed.clear()
        if mode is PauseMode.ABORT:
            for stopped in self._running.values():
                stopped.set()

    async def resume(self) -> None:
        self._resumed.set()

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """There are no weights; tokens carry the new version from now on."""
        self._version = self._version + 1 if version is None else version
        return self._version

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        raise EngineIncapable(f"the scripted engine has no weights for {step.value}")

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        raise EngineIncapable("the scripted engine holds no memory that it could release")

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        raise EngineIncapable("the scripted engine holds no memory that it could release")

    async def flush_cache(self) -> None:
        """No cache."""

    def info(self) -> EngineInfo:
        vocab_size, context_length, model = self._info
        return EngineInfo(
            name="scripted",
            model=model,
            vocab_size=vocab_size,
            context_length=context_length,
            weight_version=self._version,
            capabilities=frozenset(Capability) - {Capability.RELEASE_MEMORY},
        )

    async def close(self) -> None:
        for stopped in self._running.values():
            stopped.set()

    def _check(self, request: GenerateRequest) -> None:
        ids = np.frombuffer(request.input_ids, np.uint32)  # a negative id is a large one
        if len(ids) and ids.max() >= self._info[0]:
            raise InvalidRequest("an input id is outside the vocabulary", param="input_ids")

    async def _play(self, reply: Reply, request: GenerateRequest, stopped: asyncio.Event) -> AsyncIterator[TokenChunk]:
        limit = request.sampling.max_tokens
        ids = reply.ids if limit is None else reply.ids[:limit]
        for start in range(0, max(len(ids), 1), reply.chunk):
            if reply.fault is not None and start >= reply.fault_after and reply.fault is not Fault.BAD_LENGTHS:
                await self._fail(reply.fault, stopped)
                return
            await self._wait(reply.delay_s, stopped)
            if stopped.is_set():
                yield TokenChunk(ids_of(), array("f"), self._version, FinishReason.ABORT)
                return
            piece = ids[start : start + reply.chunk]
            finish = self._finish(reply, ids, request) if start + reply.chunk >= len(ids) else None
            yield self._chunk(reply, piece, finish, request.top_logprobs)

    async def _wait(self, delay_s: float, stopped: asyncio.Event) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        if not self._resumed.is_set():
            waiting = [asyncio.ensure_future(event.wait()) for event in (self._resumed, stopped)]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()

    async def _fail(self, fault: Fault, stopped: asyncio.Event) -> None:
        if fault is Fault.ERROR:
            raise EngineFailed("the script says that the engine fails here")
        if fault is Fault.HANG:
            await stopped.wait()

    def _finish(self, reply: Reply, ids: Ids, request: GenerateRequest) -> FinishReason:
        if reply.finish is not None:
            return reply.finish
        return FinishReason.STOP if ids and ids[-1] in request.stop_token_ids else FinishReason.LENGTH

    def _chunk(self, reply: Reply, ids: Ids, finish: FinishReason | None, top: int) -> TokenChunk:
        count = len(ids) - 1 if reply.fault is Fault.BAD_LENGTHS else len(ids)
        version = self._version if reply.version is None else reply.version
        others = tuple(tuple(self._ranked(token, top)) for token in ids) if top else ()
        return TokenChunk(ids, array("f", [_LOGPROB]) * count, version, finish, others)

    def _ranked(self, token: int, top: int) -> Iterator[tuple[int, float]]:
        """The sampled token first, then its neighbours in the vocabulary, each half as likely as the one before."""
        for rank in range(top):
            yield (token + rank) % self._info[0], _LOGPROB * (rank + 1)


def from_arguments(
    arguments: dict[str, str], vocab_size: int, context_length: int, speech: Speech | None = None
) -> ScriptedEngine:
    """The engine of `serve --engine scripted`, as `--engine-arg` says.

    play=babble (the default): `tokens` (128), `chunk` (all at once). play=agent: `chunk` (1), `think` (0), see
    `acting`. Both: `delay_s` a chunk (0).
    """
    playing = arguments.get("play", "babble")
    own = {"babble": {"tokens"}, "agent": {"think"}}.get(playing)
    if own is None:
        raise ConfigurationError(f"--engine-arg play={playing} is not one of babble, agent")
    if unknown := set(arguments) - {"play", "chunk", "delay_s", *own}:
        known = ", ".join(sorted({"play", "chunk", "delay_s", *own}))
        raise ConfigurationError(f"--engine-arg {min(unknown)} is unknown; play={playing} has {known}")
    try:
        script = _script(playing, arguments, vocab_size, speech)
    except ValueError as error:
        raise ConfigurationError(f"--engine-arg: {error}") from None
    engine = ScriptedEngine(script, vocab_size=vocab_size, context_length=context_length)
    engine.keep_requests = False
    return engine


def _script(playing: str, arguments: dict[str, str], vocab_size: int, speech: Speech | None) -> Script:
    """Raises ValueError for a number that is none or out of range."""
    tokens = int(arguments.get("tokens", "128"))
    chunk = int(arguments.get("chunk", str(tokens) if playing == "babble" else "1"))
    delay_s = float(arguments.get("delay_s", "0"))
    if tokens < 1 or chunk < 1 or delay_s < 0:
        raise ValueError("tokens and chunk must be at least 1, delay_s at least 0")
    if playing == "babble":
        return babble(tokens, vocab_size, chunk, delay_s)
    if speech is None:
        raise ConfigurationError("--engine-arg play=agent needs a renderer")
    from proxy.engine.acting import act  # it imports this module

    return act(speech, think=bool(int(arguments.get("think", "0"))), chunk=chunk, delay_s=delay_s)
