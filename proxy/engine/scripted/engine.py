"""An engine that plays a script, token for token: for tests, demonstrations and benchmarks.

Deterministic: the same script and the same prompts give the same ids, logprobs and faults.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import AdapterSource, Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.scripts import Fault, Reply, Script
from proxy.types import Ids, ids_of
from tokengrove.errors import EngineFailed, EngineIncapable, EngineUnavailable, InvalidRequest
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

_LOGPROB = math.log(0.5)
_MISSING = frozenset({Capability.PROMPT_LOGPROBS, Capability.PROMPT_TEMPERATURE})
_RUNNING = 16
"""The number of requests that it reports to run at once: replies share one event loop and have nothing to wait for."""


class ScriptedEngine:
    """Implements `proxy.engine.interface.Engine` by playing `script`.

    `requests`: every request received (while `keep_requests` is True), for tests. `aborted`: ids passed to `abort`.
    `adapters`: the loaded adapters by version; they change only the version of the tokens.
    """

    def __init__(
        self, script: Script, *, vocab_size: int, context_length: int = 131_072, model: str = "scripted"
    ) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.adapters: dict[int, AdapterSource] = {}
        self.keep_requests = True
        self.leads, self.busy_elsewhere = True, False
        self._info = EngineInfo(
            *("scripted", model, vocab_size, context_length, 0, frozenset(Capability) - _MISSING),
            max_running_requests=_RUNNING,
            records=frozenset({Replay.TOP_LOGPROBS}),
        )
        self._version = 0
        self._mode: PauseMode | None = None
        self._running: dict[str, asyncio.Event] = {}
        self._resumed = asyncio.Event()
        self._resumed.set()

    @property
    def running(self) -> list[str]:
        """The ids of the requests in flight."""
        return list(self._running)

    async def start(self) -> None:
        """Do nothing: there is no model to load."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Play the reply of the script. Raises InvalidRequest, or the error of the reply's `fault`."""
        self._check(request)
        if self.keep_requests:
            self.requests.append(request)
        stopped = self._running[request.request_id] = asyncio.Event()
        try:
            async with aclosing(self._play(self.script(request), request, stopped)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            del self._running[request.request_id]

    async def abort(self, request_id: str) -> None:
        """End a request with `FinishReason.ABORT`; unknown ids are ignored."""
        self.aborted.append(request_id)
        if (stopped := self._running.get(request_id)) is not None:
            stopped.set()

    async def pause(self, mode: PauseMode) -> None:
        """Hold replies before their next chunk; with mode ABORT, end them."""
        self._mode = mode
        self._resumed.clear()
        if mode is PauseMode.ABORT:
            for stopped in self._running.values():
                stopped.set()

    async def resume(self) -> None:
        """Continue the replies that `pause` holds."""
        self._mode = None
        self._resumed.set()

    def common(self) -> dict[str, Any]:
        """The pause and the version."""
        return {"mode": self._mode, "version": self._version}

    async def adopt(self, common: Mapping[str, Any]) -> None:
        """Adopt the pause and the version of another process."""
        self._version = common["version"]
        if common["mode"] is None:
            await self.resume()
        else:
            await self.pause(PauseMode(common["mode"]))

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Set the version that tokens carry from now on. There are no weights, so `path` is not read."""
        self._version = self._version + 1 if version is None else version
        return self._version

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Raises EngineIncapable: there are no weights."""
        raise EngineIncapable(f"the scripted engine has no weights for {step.value}")

    async def load_adapter(self, version: int, source: AdapterSource) -> None:
        """Note an adapter. It has no effect on the script, so `source` is not read."""
        self.adapters[version] = source

    async def unload_adapter(self, version: int) -> None:
        """Forget an adapter; unknown versions are ignored."""
        self.adapters.pop(version, None)

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Do nothing: there is no memory to release. A trainer's sleep is only a pause here."""

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Do nothing: no memory was released."""

    async def flush_cache(self) -> None:
        """Do nothing: there is no cache."""

    def info(self) -> EngineInfo:
        """Facts about the engine; valid even before `start`."""
        if self._info.weight_version != self._version:
            self._info = replace(self._info, weight_version=self._version)
        return self._info

    async def close(self) -> None:
        """End all replies with `FinishReason.ABORT`."""
        for stopped in self._running.values():
            stopped.set()

    def _check(self, request: GenerateRequest) -> None:
        if request.prompt.largest >= self._info.vocab_size:
            raise InvalidRequest(
                f"input_ids has an id outside of the vocabulary (0 to {self._info.vocab_size - 1})", param="input_ids"
            )
        if request.adapter is not None and request.adapter not in self.adapters:
            raise EngineUnavailable(f"adapter {request.adapter} is not loaded")

    async def _play(
        self, reply: Reply, request: GenerateRequest, stopped: asyncio.Event
    ) -> AsyncGenerator[TokenChunk, None]:
        limit = request.sampling.max_tokens
        ids = _long_enough(reply.ids, request)
        ids = ids if limit is None else ids[:limit]
        for start in range(0, max(len(ids), 1), reply.chunk):
            if reply.fault is not None and start >= reply.fault_after and reply.fault is not Fault.BAD_LENGTHS:
                await self._fail(reply.fault, stopped)
                return
            await self._wait(reply.delay_s, stopped)
            if stopped.is_set():
                yield TokenChunk(ids_of(), array("f"), self._version_of(request), FinishReason.ABORT)
                return
            piece = ids[start : start + reply.chunk]
            finish = self._finish(reply, ids, request) if start + reply.chunk >= len(ids) else None
            yield self._chunk(reply, piece, finish, request)

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

    def _version_of(self, request: GenerateRequest) -> int:
        return self._version if request.adapter is None else request.adapter

    def _chunk(self, reply: Reply, ids: Ids, finish: FinishReason | None, request: GenerateRequest) -> TokenChunk:
        count, top = len(ids) - 1 if reply.fault is Fault.BAD_LENGTHS else len(ids), request.top_logprobs
        version = self._version_of(request) if reply.version is None else reply.version
        others = tuple(tuple(self._ranked(token, top)) for token in ids) if top else ()
        logprobs = array("f", [_LOGPROB]) * count
        return TokenChunk(ids, logprobs, version, finish, others, logprobs_of=reply.logprobs_of)

    def _ranked(self, token: int, top: int) -> Iterator[tuple[int, float]]:
        """Yield the sampled token, then the next ids of the vocabulary, each half as likely as the one before."""
        for rank in range(top):
            yield (token + rank) % self._info.vocab_size, _LOGPROB * (rank + 1)


def _long_enough(ids: Ids, request: GenerateRequest) -> Ids:
    """Return `ids` with at least `min_tokens` before the first end token. The tokens before it are repeated."""
    least, ends = request.sampling.min_tokens, request.stop_token_ids
    said = next((at for at, token in enumerate(ids) if token in ends), len(ids)) if least else len(ids)
    if said == len(ids) or said >= least:
        return ids
    words = ids[:said] or ids_of([next(token for token in itertools.count() if token not in ends)])
    return ids_of(itertools.islice(itertools.cycle(words), least)) + ids[said:]
