"""One vLLM server over HTTP: token ids in, token ids, logprobs and weight versions out.

Facts about the server are read at start (`proxy.engine.servers.vllm_facts`). Its weight version is the version that it
reports when asked, or that was loaded since. Weights from a folder are loaded in two calls: the first names the update
in progress, so that a process that finds this name finishes the update of a process that died in between. Cached
prefixes are not shared between weight versions (`cache_salt`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from proxy.engine.callbacks import generated
from proxy.engine.chunks import TakeChunk, TokenChunk, of_adapter
from proxy.engine.interface import AdapterSource, Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest, check_request
from proxy.engine.scored_prompt import ScoredPrompt, sample_scores
from proxy.engine.servers.connection import (
    NO_KEYS,
    EventStream,
    Keys,
    NotServed,
    ServerConnection,
    Stopped,
    WholeReply,
    with_prompt,
)
from proxy.engine.servers.remote import adapter_fault, named_adapter
from proxy.engine.servers.same_model import OwnModel, is_same
from proxy.engine.servers.sent_images import Eyes
from proxy.engine.servers.vllm_columns import ReplyColumns, first_experts
from proxy.engine.servers.vllm_facts import LOAD_ADAPTER, UNLOAD_ADAPTER, VllmFacts, read_facts, rests
from proxy.engine.servers.vllm_sight import blindness, sent_prompt
from proxy.engine.servers.vllm_wire import (
    COMPLETIONS,
    GENERATE,
    VllmReply,
    completions_body,
    generate_body,
    logprobs_of,
    sampling_params,
)
from proxy.engine.streams import Streams
from proxy.engine.version_names import VersionNumbers
from proxy.types import Logprobs, SamplingParams, ids_of
from tokengrove.errors import (
    EngineFailed,
    EngineIncapable,
    EngineLost,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
    UnsupportedParameter,
)
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

logger = logging.getLogger(__name__)

_ABORTS = "/inference/v1/abort_requests"
_ID_PREFIX = "generate-tokens-"
"""vLLM puts this before the `request_id` of a request to GENERATE."""

_ID_BITS = 64
_ABORT_S = 5.0
_LATE_S = 2.0
"""Seconds for replies to arrive after a pause in mode abort."""

_WAKE_TAGS = ("weights", "kv_cache")
_NEVER = -100.0
"""The bias of tokens that are never sampled. vLLM accepts none that is lower."""

_HERE = ("127.0.0.1", "localhost", "::1")
_WEIGHTS = (".safetensors", ".bin", ".pt")

_REPLAY = "sampling distribution replay"
"""What vLLM's refusals because of `--return-sampling-mask` begin with."""

_UPDATING = "tokengrove-update:"
"""The beginning of the weight version of a server while an update loads its weights; JSON follows."""

_NEEDS_CONTROL = "start the vLLM server {url} with VLLM_SERVER_DEV_MODE=1 in its environment: it has no {path}"


class VllmServer:
    """Implements `RemoteEngine`. `vocab_size`: the vocabulary size of the model, which servers do not report.

    `numbers`, `streams`, `eyes` and `own` are shared by all servers of a pool. `eyes`: None unless it is a vision
    model. `own`: the model that the server must serve; None: any. `blind`: the reason why the server takes no images of
    a vision model, else "". `compared`: as in `RemoteEngine`.
    """

    def __init__(
        self,
        url: str,
        vocab_size: int,
        numbers: VersionNumbers | None = None,
        keys: Keys = NO_KEYS,
        streams: Streams | None = None,
        eyes: Eyes | None = None,
        own: OwnModel | None = None,
    ) -> None:
        self._connection = ServerConnection(url, keys)
        self.url = self._connection.url
        self._vocab_size = vocab_size
        self._numbers = numbers or VersionNumbers()
        self._streams = streams or Streams()
        self._facts = VllmFacts()
        self._eyes, self._own = eyes, own
        self._never = {} if eyes is None else eyes.never_sampled(_NEVER)
        self.blind = ""
        self.compared = False
        self._version = self._newest = 0
        self._mode: PauseMode | None = None
        self._hollow = False
        self._replies: dict[str, tuple[str, EventStream]] = {}
        self._lacking: set[tuple[str, str]] = set()
        self._ended = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._info = self._described()

    async def start(self) -> None:
        """Read facts about the server. Raises EngineLost, EngineUnavailable, OtherModel, EngineFailed."""
        self._facts = facts = await read_facts(self._connection)
        await self.check()
        if self._hollow:
            raise EngineUnavailable(f"{self.url} has no weights: a weight transfer was interrupted; restart the server")
        if self._own is not None:
            names = {"model": facts.model}
            self.compared = await is_same(self._connection, self._own, names, facts.model, facts.model_path)
        if self._eyes is not None:
            lacks = "" if facts.generates else "it was started without --enable-scale-out, or is too old for it"
            self.blind = lacks or await blindness(self._connection, facts.model)
        self._info = self._described()

    @property
    def missing(self) -> list[str]:
        """What the server lacks, and what that costs."""
        return self._facts.missing

    @property
    def logprobs_mode(self) -> str:
        """The value of the server's `--logprobs-mode`."""
        return "processed_logprobs" if self._facts.processed else "raw_logprobs"

    async def check(self) -> int:
        """Return the weight version that the server reports. Raises EngineLost or EngineUnavailable.

        While an update is in progress, this is the version before.
        """
        if not self._facts.names_weights:
            if await self._connection.probe("/version") is None:
                raise EngineUnavailable(f"{self.url} is not a vLLM server: it has no /version")
            return self._version
        told = await self._connection.probe("/weight_info")
        if told is None or "weight_version" not in told:
            raise EngineUnavailable(f"{self.url} does not tell its weight version any more")
        begun = _begun(told["weight_version"])
        self._hollow = begun is not None and "path" not in begun
        return self._serves(told["weight_version"] if begun is None else begun["before"])

    async def finish_update(self) -> None:
        """Finish an update that a process began and did not finish. Raises EngineLost, EngineUnavailable."""
        told = await self._connection.probe("/weight_info") if self._facts.names_weights else None
        begun = _begun((told or {}).get("weight_version"))
        if begun is None:
            return
        try:
            await self._load(begun["path"], begun["after"])
        except InvalidRequest as error:
            raise EngineUnavailable(
                f"{self.url} has unknown weights: an update to version {begun['after']} was interrupted, and cannot be "
                f"repeated ({error.message}); restart the server"
            ) from None

    async def rests(self) -> bool:
        """True if the server reports that it is paused. Raises EngineLost."""
        return await rests(self._connection, self._facts)

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        """Sample a continuation. Raises EngineLost, InvalidRequest, UnsupportedParameter or EngineFailed."""
        if request.adapter is None and request.scored_from is None:
            return await self._sample(request, take)
        if request.adapter is not None:
            take = of_adapter(take, request.adapter)
        try:
            if request.scored_from is None:
                return await self._sample(request, take)
            return await sample_scores(self._sample, self._scoring(request), take, lambda: self._version)
        except (InvalidRequest, NotServed) as error:
            raise adapter_fault(self.url, request, error) from None

    async def _sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        check_request(request, self._vocab_size, self._facts.context_length)
        reply = VllmReply(
            self._numbers,
            request.prompt,
            request.top_logprobs,
            logprobs_of(request.sampling, processed=self._facts.processed),
            self._version,
            says_ids=request.images is not None,
            model=named_adapter(request),
            columns=self._asked_columns(request),
            scored=None if request.scored_from is None else ScoredPrompt.of(request, self._vocab_size),
        )
        stopped: FinishReason | None = None

        def pass_on(chunks: Sequence[TokenChunk]) -> None:
            nonlocal stopped
            for chunk in chunks:
                if stopped is None:
                    stopped = take(chunk)
                elif chunk.columns is not None:
                    take(TokenChunk(ids_of(), Logprobs("f"), chunk.version, columns=chunk.columns))

        def read(events: Sequence[Any]) -> bool:
            ended_before = stopped is not None
            pass_on(reply.read(events, self._version, self._newest))
            if stopped is not None and reply.finish is None and not ended_before:
                self._end_soon(rid, reply, stream)
            return reply.given

        stream = EventStream(read) if request.scored_from is None else WholeReply(read)
        rid = f"{random.getrandbits(_ID_BITS):016x}"
        self._replies[request.request_id] = rid, stream
        self._streams.running += request.streamed
        try:
            await self._send(request, rid, stream)
            pass_on(reply.last())
        except Stopped:
            if stopped is None:
                pass_on([TokenChunk(ids_of(), Logprobs("f"), self._version, FinishReason.ABORT)])
                return stopped or FinishReason.ABORT
        except EngineLost:
            if reply.finish is None:
                raise
            pass_on(reply.last())  # only the token counts are lost
        finally:
            if reply.columns is not None and (reply.finish is not None or stopped is not None):
                self._name_missing(reply.columns, request.sampling, reply.finish)
            self._streams.running -= request.streamed
            del self._replies[request.request_id]
            self._ended.set()
            if reply.finish is None:
                self._abort_soon(rid)
        return stopped or reply.finish

    def _scoring(self, request: GenerateRequest) -> GenerateRequest:
        """A request with `scored_from` as this server takes it.

        With `--return-sampling-mask` vLLM refuses requests without `top_k`, which does not change logprobs of prompts.
        """
        if Replay.KEPT not in self._facts.returned or request.sampling.top_k > 0:
            return request
        return replace(request, sampling=request.sampling._replace(top_k=1))

    def _asked_columns(self, request: GenerateRequest) -> ReplyColumns | None:
        """The columns that a request wants of the reply; None: none."""
        if request.columns is None:
            return None
        exact = self._facts.processed and request.sampling.temperature > 0.0
        return ReplyColumns(
            request.columns, self._vocab_size, len(request.prompt), exact=exact, start=first_experts(request)
        )

    def _end_soon(self, rid: str, reply: VllmReply, stream: EventStream) -> None:
        """End a reply whose further tokens are not wanted. Experts arrive with its last part, so wait for that a while.

        Raises Stopped if there is nothing to wait for.
        """
        if reply.columns is None or not reply.columns.lacks_experts or _ABORTS not in self._facts.paths:
            raise Stopped
        self._abort_soon(rid)
        asyncio.get_running_loop().call_later(_LATE_S, stream.fail, Stopped())

    def _name_missing(self, columns: ReplyColumns, sampling: SamplingParams, finish: FinishReason | None) -> None:
        """Log rows that a reply lacks, once for each column and reason."""
        for column, reason in columns.missing(sampling, finish):
            if (column, reason) not in self._lacking:
                self._lacking.add((column, reason))
                logger.warning(
                    "replies of an engine server lack rows", {"server": self.url, "column": column, "reason": reason}
                )

    async def _send(self, request: GenerateRequest, rid: str, reply: EventStream) -> None:
        params = sampling_params(request, self._never)
        salt = {"cache_salt": str(self._version)} if self._version else {}
        names = {"model": named_adapter(request) or self._facts.model, **salt}
        prompt: Any = request.prompt
        if request.images is not None:
            if self._eyes is None or self.blind:
                raise UnsupportedParameter(f"{self.url} takes no images: {self.blind}", param="messages")
            prompt = await sent_prompt(self._eyes.images, request)
            if reply.ended.done():  # it was aborted meanwhile
                raise Stopped
        send = self._connection.stream if request.scored_from is None else self._connection.answer
        headers = request.trace_headers()
        if request.session_id:
            headers["x-session-id"] = request.session_id
        if self._facts.generates:
            returns_experts = Replay.EXPERTS in self._facts.returned
            interval = self._streams.interval(request)
            body = generate_body(request, params, interval, returns_experts=returns_experts)
            message = with_prompt({"request_id": rid, **names, **body}, "token_ids", prompt)
            try:
                await send(GENERATE, message, headers, reply)
            except InvalidRequest as error:
                raise self._explained(error, request.sampling) from None
            return
        if request.grammar is not None:
            raise UnsupportedParameter(
                f"{self.url} serves no forced tools and no JSON schemas: {self._facts.missing[0]}", param="tool_choice"
            )
        message = with_prompt({**names, **completions_body(request, params)}, "prompt", prompt)
        await send(COMPLETIONS, message, headers, reply)

    def _explained(self, error: InvalidRequest, sampling: SamplingParams) -> InvalidRequest:
        """The error of a refused request; with the way out if it was refused because the server returns masks."""
        if _REPLAY not in error.message:
            return error
        field, lack = ("top_k", "without top_k") if sampling.top_k <= 0 else ("temperature", "with temperature 0")
        return InvalidRequest(
            f"the vLLM server {self.url} was started with --return-sampling-mask, with which vLLM refuses requests "
            f"{lack}; send another {field}, or start it without the flag",
            param=field,
        )

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same, as a generator."""
        return generated(self.sample, request)

    async def abort(self, request_id: str) -> None:
        """End a request with `FinishReason.ABORT`; unknown ids are ignored."""
        if (found := self._replies.get(request_id)) is None:
            return
        rid, reply = found
        if not self._facts.generates or _ABORTS not in self._facts.paths or reply.begun is None:
            reply.fail(Stopped())  # the server ends a request when its connection is closed
            return
        await self._connection.call(_ABORTS, {"request_ids": [_ID_PREFIX + rid]}, limit_s=_ABORT_S)

    def cut(self) -> None:
        """Abandon all replies in flight: each raises EngineLost."""
        self._connection.cut()

    def _abort_soon(self, rid: str) -> None:
        """Free a request that is no longer read, also behind a router that keeps its connection."""
        if _ABORTS in self._facts.paths:
            task = asyncio.create_task(self._abort_quietly(rid))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self._connection.call(_ABORTS, {"request_ids": [_ID_PREFIX + rid]}, limit_s=_ABORT_S)
        except ProxyError:
            return  # a lost server has nothing to free

    async def pause(self, mode: PauseMode) -> None:
        """Pause the server. After a pause in mode ABORT, no request is in flight on it.

        Raises EngineIncapable if the server has no pauses and requests must keep their state.
        """
        if self._facts.controls:
            kept = "abort" if mode is PauseMode.ABORT else "keep"
            await self._connection.call(f"/pause?mode={kept}&clear_cache=false")
            if mode is PauseMode.RETRACT:
                await self._reset("/reset_prefix_cache?reset_running_requests=true")
        elif mode is not PauseMode.ABORT and self._replies:
            raise EngineIncapable(self._lacks("/pause") + "; or use mode abort or drain")
        self._mode = mode
        if mode is PauseMode.ABORT:
            await self._end_late()

    async def _end_late(self) -> None:
        """End the requests that a paused server would hold, since they reached it after its abort."""
        if self._facts.controls:
            try:
                async with asyncio.timeout(_LATE_S):
                    while self._replies:
                        self._ended.clear()
                        await self._ended.wait()
            except TimeoutError:
                pass
        for _, reply in list(self._replies.values()):
            reply.fail(Stopped())

    async def follow(self, mode: PauseMode | None, version: int | None) -> None:
        """Note the pause and version of another process. After mode ABORT, no request of this process is in flight."""
        begins, self._mode = mode is not self._mode, mode
        if version is not None:
            self._serves(version)
        if begins and mode is PauseMode.ABORT:
            await self._end_late()
        elif begins and mode is not None and self._replies and not self._facts.controls:
            raise EngineIncapable(self._lacks("/pause") + "; or use mode abort or drain")

    async def resume(self) -> None:
        """Resume the server. Raises InvalidRequest in the middle of a weight transfer."""
        if self._hollow:
            raise InvalidRequest(f"{self.url} has no weights: send finish_weight_update, or restart the server")
        if self._facts.controls:
            await self._connection.call("/resume")
        self._mode = None

    async def update_weights(self, path: str, version: int | None = None, *, busy: bool = False) -> int:
        """Load the weights in folder `path` of the server's file system. Raises InvalidRequest if it refuses.

        Tokens that a running server samples meanwhile are uncertain, since their version is that of no weights.
        """
        if not self._facts.controls or not self._facts.names_weights:
            raise EngineIncapable(self._lacks("/collective_rpc"))
        self._check_folder(Path(path))
        new = self._version + 1 if version is None else version
        await self._load(path, new)
        if self._mode is not PauseMode.IN_PLACE or not (self._replies or busy):
            await self.flush_cache()
            if self._eyes is not None:
                await self._connection.call("/reset_encoder_cache")
        return new

    def _check_folder(self, folder: Path) -> None:
        """Raise InvalidRequest for a folder without weights, which would end vLLM. Only local files can be checked."""
        if urlsplit(self.url).hostname not in _HERE or not folder.parent.is_dir():
            return
        if not any(file.suffix in _WEIGHTS for file in folder.glob("*")):
            raise InvalidRequest(f"{folder} has no weights ({', '.join(_WEIGHTS)})", param="path")

    async def _load(self, path: str, version: int) -> None:
        """Load weights between two names: that of the update in progress, and that of the new weights."""
        before = self._version
        begun = orjson.dumps({"before": before, "after": version, "path": path}).decode()
        await self._name(_UPDATING + begun)
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
            await self._connection.call("/collective_rpc", body)
        except EngineLost:
            raise
        except ProxyError as error:
            await self._name(before)
            raise InvalidRequest(error.message, param="path") from None
        await self._name(version)
        self._serves(version)

    async def _name(self, version: int | str) -> None:
        await self._connection.call("/update_weight_version", {"new_version": str(version)})

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass a step to the server unchanged. Raises EngineIncapable for SGLang's steps.

        From START to FINISH vLLM has no weights, and sampling would end it. Raises InvalidRequest for a START without a
        pause.
        """
        if not step.of_vllm:
            raise EngineIncapable(
                f"a vLLM server has no {step.value}: the steps of its weight transfers have other names"
            )
        if not self._facts.controls or not self._facts.names_weights:
            raise EngineIncapable(self._lacks(f"/{step.value}"))
        if step is WeightTransfer.START:
            if self._mode is None:
                raise InvalidRequest("pause the engine before start_weight_update: vLLM then has no weights")
            await self._name(_UPDATING + orjson.dumps({"before": self._version}).decode())
        try:
            await self._connection.call(f"/{step.value}", fields)
        except EngineFailed as error:
            if step is WeightTransfer.START:
                await self._name(self._version)
            raise InvalidRequest(error.message) from None
        self._hollow = step is WeightTransfer.START or (self._hollow and step is not WeightTransfer.FINISH)
        if step is WeightTransfer.FINISH:
            named = fields.get("weight_version")
            if named is None:
                await self._name(self._version)
            else:
                self._serves(named)
        return self._version

    @property
    def adapterless(self) -> str:
        """The reason why the server takes no LoRA adapters, with the way out; "" if it does."""
        lacks = self._facts.without_lora
        return f"to load LoRA adapters, start the vLLM server {self.url} with {lacks}" if lacks else ""

    async def load_adapter(self, name: str, source: AdapterSource) -> None:
        """Load a LoRA adapter from its folder on the server's file system. Raises InvalidRequest, EngineIncapable."""
        if self.adapterless:
            raise EngineIncapable(self.adapterless)
        try:
            await self._connection.call(LOAD_ADAPTER, {"lora_name": name, "lora_path": source.path})
        except NotServed as error:
            raise InvalidRequest(
                f"{self.url} does not find the adapter in {source.path}, which must be a folder on a file system that "
                f"it shares ({error.reason})",
                param="path",
            ) from None
        except (InvalidRequest, EngineFailed) as error:
            if "already been loaded" in error.message:
                return
            if "LoRA is not enabled" in error.message:
                raise EngineIncapable(f"start the vLLM server {self.url} with --enable-lora --max-loras N") from None
            raise InvalidRequest(error.message, param="path") from None

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Unknown names are ignored."""
        with suppress(NotServed):
            await self._connection.call(UNLOAD_ADAPTER, {"lora_name": name})

    async def adapters(self) -> frozenset[str]:
        """The names of the model and of its adapters."""
        models = (await self._connection.probe("/v1/models") or {}).get("data") or []
        return frozenset(str(model["id"]) for model in models)

    def _serves(self, version: Any) -> int:
        """Note the version name of the server; return its number."""
        self._version = self._numbers.believe(version)
        self._newest = max(self._newest, self._version)
        return self._version

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Put vLLM to sleep at level 1. Raises InvalidRequest for `tags`: vLLM releases all memory or none."""
        if tags:
            raise InvalidRequest("a vLLM server releases all of its memory or none; leave out 'tags'", param="tags")
        if not self._facts.sleeps:
            raise EngineIncapable(f"to release memory, start the vLLM server {self.url} with --enable-sleep-mode")
        await self._connection.call("/sleep?level=1")

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Wake vLLM up: the weights and KV cache that `tags` name, or all."""
        wanted = [f"tags={tag}" for tag in tags if tag in _WAKE_TAGS]
        if wanted or not tags:
            await self._connection.call("/wake_up" + ("?" if wanted else "") + "&".join(wanted))

    async def flush_cache(self) -> None:
        """Empty the prefix cache. If necessary, requests in flight lose their keys and values, and recompute them."""
        if not self._facts.controls:
            raise EngineIncapable(self._lacks("/reset_prefix_cache"))
        try:
            await self._reset("/reset_prefix_cache")
        except EngineFailed:
            await self._reset("/reset_prefix_cache?reset_running_requests=true")

    async def _reset(self, path: str) -> None:
        answer = await self._connection.call(path)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineFailed(f"{self.url} cannot empty its prefix cache")

    def _lacks(self, path: str) -> str:
        return _NEEDS_CONTROL.format(url=self.url, path=path)

    @property
    def world_size(self) -> int:
        """The number of the server's processes that have weights."""
        return self._facts.world_size

    def info(self) -> EngineInfo:
        """Facts about the server; valid after `start`."""
        if self._info.weight_version != self._version:
            self._info = replace(self._info, weight_version=self._version)
        return self._info

    def _described(self) -> EngineInfo:
        sees = self._eyes is not None and not self.blind
        return EngineInfo(
            name="vllm",
            model=self._facts.model,
            vocab_size=self._vocab_size,
            context_length=self._facts.context_length,
            weight_version=self._version,
            capabilities=self._facts.capabilities | ({Capability.IMAGES} if sees else frozenset()),
            detail=f"vLLM {self._facts.version} at {self.url}",
            dtype=self._facts.dtype,
            quantization=self._facts.quantization,
            max_running_requests=self._facts.max_running_requests,
            records=self._facts.records | {Replay.TOP_LOGPROBS},
            unrecorded=tuple((column, f"{self.url}: {why}") for column, why in self._facts.unrecorded.items()),
            dense=self._facts.dense or (self._own is not None and self._own.dense),
        )

    async def close(self) -> None:
        """Abort requests in flight and close the connections; the server keeps running."""
        for rid, reply in list(self._replies.values()):
            reply.fail(Stopped())
            self._abort_soon(rid)
        await asyncio.gather(*self._background)
        await self._connection.close()


def _begun(version: Any) -> dict[str, Any] | None:
    """The update that a weight version says is in progress, or None."""
    text = str(version)
    return orjson.loads(text.removeprefix(_UPDATING)) if text.startswith(_UPDATING) else None
