"""One SGLang server over HTTP: token ids in, token ids and logprobs out.

A reply that is not streamed to the client is requested in one piece, since each part of an SGLang stream repeats all
earlier parts. A long reply is requested in a few pieces, which prove that the server is alive. Facts about the server
are read at start. Its weight version is the version that it reports when asked, or that was loaded since; a version
that only a reply names is not trusted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from proxy.engine.callbacks import generated
from proxy.engine.chunks import TakeChunk, TokenChunk, of_adapter, once_counted
from proxy.engine.expert_layers import ExpertLayers
from proxy.engine.interface import AdapterSource, Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest, check_request, rest_of
from proxy.engine.scored_prompt import sample_scores
from proxy.engine.servers.connection import (
    NO_KEYS,
    EventStream,
    Keys,
    NotServed,
    ServerConnection,
    Stopped,
    with_prompt,
)
from proxy.engine.servers.remote import adapter_fault, named_adapter
from proxy.engine.servers.same_model import OwnModel, is_same
from proxy.engine.servers.sent_images import Eyes, SentPrompt
from proxy.engine.servers.sglang_sight import ASKS, SglangSight, check_ids
from proxy.engine.sglang.facts import (
    SEEDED,
    adapterless_by,
    capabilities_by,
    dtype_by,
    missing_by,
    recorded_by,
    running_by,
    unrecorded_by,
)
from proxy.engine.sglang.replay import ReplayPlan, refuses_masks, replay_plan, without_masks
from proxy.engine.sglang.scores import scored_prompt
from proxy.engine.sglang.wire import SglangReply, sampling_params
from proxy.engine.streams import Streams
from proxy.engine.version_names import VersionNumbers
from proxy.prompt_ids import PromptIds
from proxy.types import Logprobs, ids_of
from tokengrove.errors import (
    EngineFailed,
    EngineIncapable,
    EngineLost,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
    UnsupportedParameter,
)
from tokengrove.reasons import FinishReason

logger = logging.getLogger(__name__)

_RESERVED_TOKENS = 4
_ID_BITS = 64
_DEFAULT_CONTEXT = 32_768
_PIECE_TOKENS = 2048
"""Tokens per piece of a long unstreamed reply: few enough that a slow server samples them within --engine-timeout-s."""

_NEVER = -1e9
"""The bias of tokens that are never sampled: it makes their probability 0 and increases those of other tokens."""

_ABORT_S = 5.0
_LATE_S = 2.0
"""Seconds for replies to arrive after an abort. The server sends them before it answers the pause."""


class _Renewed(Exception):
    """The weights that have seen a request's images were replaced. The rest is sampled in a new request."""


class SglangServer:
    """Implements `RemoteEngine`. `vocab_size`: the vocabulary size of the model, which servers do not report.

    `numbers`, `streams`, `eyes` and `own` are shared by all servers of a pool. `eyes`: None unless it is a vision
    model. `own`: the model that the server must serve; None: any. `layers`: its expert layers; None if unknown.
    `blind`: the reason why the server takes no images of a vision model, else "". `compared`: as in `RemoteEngine`.
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
        layers: ExpertLayers | None = None,
    ) -> None:
        self._connection = ServerConnection(url, keys)
        self.url = self._connection.url
        self._vocab_size = vocab_size
        self._numbers = numbers or VersionNumbers()
        self._streams = streams or Streams()
        self._facts: Mapping[str, Any] = {}
        self._eyes, self._own, self._layers = eyes, own, layers
        self._told_of_masks = False
        self._sight: SglangSight | None = None
        self._never = {} if eyes is None else eyes.never_sampled(_NEVER)
        self._seeing: dict[str, EventStream] = {}
        self._replies: dict[str, EventStream] = {}
        self.blind = ""
        self.compared = False
        self._info = self._described(0)
        self._version = self._newest = 0
        self._mode: PauseMode | None = None
        self._intervals = True
        self._rids: dict[str, str] = {}
        self._late: set[str] = set()
        self._unsent: set[str] = set()
        self._ended = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Read facts about the server. Raises EngineLost, OtherModel, EngineUnavailable if it is not SGLang."""
        await self.check()
        self._facts = await self._connection.probe("/server_info") or await self._old_facts()
        if self._eyes is not None:
            self._look(self._eyes, await self._connection.probe("/model_info") or {})
        models = (await self._connection.probe("/v1/models") or {}).get("data") or [{}]
        told = self._facts.get("max_req_input_len")
        longest = told + _RESERVED_TOKENS if told else models[0].get("max_model_len")
        self._info = self._described(int(longest or self._facts.get("context_length") or _DEFAULT_CONTEXT))
        if self._own is not None:
            path = str(self._facts.get("model_path") or "")
            self.compared = await is_same(self._connection, self._own, {}, self._info.model, path)

    def _look(self, eyes: Eyes, model: Mapping[str, Any]) -> None:
        """Determine whether the server takes images, from the facts that it reports about its model."""
        if "has_image_understanding" not in model:
            self.blind = "it does not say whether its model sees; a newer SGLang does"
        elif not model["has_image_understanding"]:
            self.blind = "the model that it serves does not see"
        elif self._facts.get("skip_tokenizer_init"):
            self.blind = "it was started with --skip-tokenizer-init"
        else:
            self._sight = SglangSight(self._connection, eyes.images, {**self._facts, **model})

    async def check(self) -> int:
        """Return the weight version that the server reports. Raises EngineLost or EngineUnavailable."""
        for path in ("/model_info", "/get_model_info"):
            if (model := await self._connection.probe(path)) is not None:
                return self._serves(model.get("weight_version", 0))
        raise EngineUnavailable(f"{self.url} is not an SGLang server: it has no /model_info")

    async def rests(self) -> bool:
        """True if the server is alive but its /ready answers 503, as newer versions of SGLang do while paused."""
        try:
            await self._connection.probe("/ready")
        except EngineLost:
            await self.check()
            return True
        return False

    async def _old_facts(self) -> Mapping[str, Any]:
        """Facts about a server older than 0.5.4."""
        facts = await self._connection.probe("/get_server_info") or {}
        return {"incremental_streaming_output": facts.get("stream_output"), **facts} if facts else {}

    def sample(self, request: GenerateRequest, take: TakeChunk) -> Coroutine[Any, Any, FinishReason | None]:
        """Sample a continuation. Raises EngineLost, InvalidRequest, ContextLengthExceeded or EngineFailed.

        SGLang does not tell which adapter sampled a reply; it refuses a request that names one that it does not have.
        """
        if request.adapter is None and request.scored_from is None:
            return self._sample(request, take)
        return self._sample_named(request, take)

    async def _sample_named(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        """Sample with an adapter, or score a prompt."""
        if request.adapter is not None:
            take = of_adapter(take, request.adapter)
        try:
            if request.scored_from is None:
                return await self._sample(request, take)
            return await sample_scores(self._sample, request, take, lambda: self._version)
        except InvalidRequest as error:
            raise adapter_fault(self.url, request, error) from None

    def _sample(
        self, request: GenerateRequest, take: TakeChunk, seen: SentPrompt | None = None
    ) -> Coroutine[Any, Any, FinishReason | None]:
        """The same. `seen`: the prompt with its images, once they are ready to be sent."""
        check_request(request, self._info.vocab_size, self._info.context_length)
        if request.images is not None and seen is None:
            return self._see(request, take)
        plan = None if request.columns is None else self._planned(request)
        if plan is None or not plan.masks:
            return self._sampled(request, take, seen, plan)
        return self._sample_masked(request, take, seen, plan)

    async def _sample_masked(
        self, request: GenerateRequest, take: TakeChunk, seen: SentPrompt | None, plan: ReplayPlan
    ) -> FinishReason | None:
        """Sample with kept sets; without them if the server refuses to report them."""
        told = ids_of()

        def collect(chunk: TokenChunk) -> FinishReason | None:
            told.extend(chunk.ids)
            return take(chunk)

        try:
            return await self._sampled(request, collect, seen, plan)
        except (InvalidRequest, EngineFailed) as error:
            if not refuses_masks(error.message) or (told and (seen is not None or request.grammar is not None)):
                raise
            self._tell_of_masks(error)
        rest = without_masks(request, told)
        return await self._sampled(rest, once_counted(take) if told else take, seen, self._planned(rest))

    async def _sampled(
        self, request: GenerateRequest, take: TakeChunk, seen: SentPrompt | None, plan: ReplayPlan | None
    ) -> FinishReason | None:
        """Sample in one request. `plan`: its side columns. The rest as in `sample`."""
        rid, streamed = _new_id(), request.streamed
        body = self._body(request, rid, streamed=streamed)
        prompt_tokens, stopped = request.prompt.length, None
        if plan is not None:
            body |= plan.fields(prompt_tokens)
        incremental = body["stream"] and bool(self._facts.get("incremental_streaming_output"))
        scored = None if request.scored_from is None else scored_prompt(request, self._vocab_size)
        reply = SglangReply(self._numbers, prompt_tokens, incremental, version=self._version, plan=plan, scored=scored)

        def read(parts: Sequence[Any]) -> bool:
            nonlocal stopped
            if seen is not None:
                check_ids(parts, request.prompt)
            ended_before = stopped is not None
            for chunk in reply.read(parts, self._version, self._newest):
                if stopped is None:
                    stopped = take(chunk)
                elif chunk.columns is not None:
                    take(TokenChunk(ids_of(), Logprobs("f"), chunk.version, columns=chunk.columns))
            if stopped is not None and reply.finish is None and not ended_before:
                self._end_soon(rid, reply)
            return reply.finish is not None

        self._rids[request.request_id] = rid
        self._streams.running += streamed
        try:
            headers = {} if request.timeline.trace is None else request.trace_headers()
            if body["stream"]:
                await self._stream(body, seen or request.prompt, headers, read)
            else:
                sent = with_prompt(body, "input_ids", seen or request.prompt)
                read([await self._connection.generate("/generate", sent, headers)])
            return stopped or reply.finish
        except Stopped:
            return stopped
        except EngineLost:
            if rid not in self._late:
                raise
            return take(self._aborted()) or FinishReason.ABORT
        finally:
            self._streams.running -= streamed
            del self._rids[request.request_id]
            self._late.discard(rid)
            self._replies.pop(rid, None)
            self._seeing.pop(rid, None)
            self._ended.set()
            if reply.finish is None:
                self._abort_soon(rid)

    def _end_soon(self, rid: str, reply: SglangReply) -> None:
        """End a reply whose further tokens are not wanted. Experts arrive with its last part, so wait for that a while.

        Raises Stopped if there is nothing to wait for.
        """
        if reply.rows is None or not reply.rows.lacks_experts:
            raise Stopped
        self._abort_soon(rid)
        asyncio.get_running_loop().call_later(_LATE_S, self._replies[rid].fail, Stopped())

    def _planned(self, request: GenerateRequest) -> ReplayPlan | None:
        """The side columns that the server gives for a request."""
        return replay_plan(
            request,
            self._info.records,
            self._layers,
            self._facts,
            vocab_size=self._vocab_size,
            bans=bool(self._never),
        )

    def _tell_of_masks(self, error: ProxyError) -> None:
        """Log once that the server has refused to report kept sets."""
        if not self._told_of_masks:
            self._told_of_masks = True
            logger.warning(
                "engine server %(server)s does not report the kept sets of a request, which runs without: %(reason)s",
                {"server": self.url, "reason": error.message},
            )

    async def _see(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        """Sample after a prompt with images. Resend the images when the weights that have seen them are replaced.

        The server is then paused, and holds the rest of the request until it is resumed.
        """
        if (sight := self._sight) is None:
            raise UnsupportedParameter(f"{self.url} takes no images: {self.blind}", param="messages")
        told = ids_of()

        def collect(chunk: TokenChunk) -> FinishReason | None:
            again = bool(told)
            told.extend(chunk.ids)
            return once_counted(take)(chunk) if again else take(chunk)

        while True:
            rest, name = rest_of(request, told), _new_id()
            self._rids[request.request_id] = name
            self._unsent.add(name)
            try:
                seen = await sight.prompt(rest, self._version, request.trace_headers())
                if name in self._late:
                    return take(self._aborted()) or FinishReason.ABORT
            finally:
                self._rids.pop(request.request_id, None)
                self._unsent.discard(name)
                self._late.discard(name)
                self._ended.set()
            try:
                return await self._sample(rest, collect, seen)
            except _Renewed:
                if len(told) >= (request.sampling.max_tokens or 0):
                    return take(TokenChunk(ids_of(), Logprobs("f"), self._version, FinishReason.LENGTH))

    def _aborted(self) -> TokenChunk:
        return TokenChunk(ids_of(), Logprobs("f"), self._version, FinishReason.ABORT)

    def _renew(self) -> None:
        """Make streamed requests continue with images for the new weights. Requests in one piece keep the old ones."""
        for reply in self._seeing.values():
            reply.fail(_Renewed())

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same, as a generator."""
        return generated(self.sample, request)

    async def _stream(
        self,
        body: dict[str, Any],
        prompt: PromptIds | SentPrompt,
        headers: Mapping[str, str],
        read: Callable[[list[Any]], bool],
    ) -> None:
        """Pass the parts of the answer to `read`. If the server rejects `stream_interval`, retry without it."""
        sent, reply = with_prompt(body, "input_ids", prompt), EventStream(read)
        self._replies[body["rid"]] = reply
        if prompt.__class__ is SentPrompt:  # avoids the overhead of a call for text prompts
            self._seeing[body["rid"]] = reply
        try:
            await self._connection.stream("/generate", sent, headers, reply)
        except (InvalidRequest, EngineFailed) as error:
            if "stream_interval" not in error.message or "stream_interval" not in body["sampling_params"]:
                raise
            self._intervals = False
            del body["sampling_params"]["stream_interval"]
            sent = with_prompt(body, "input_ids", prompt)
            self._replies[body["rid"]] = reply = EventStream(read)
            await self._connection.stream("/generate", sent, headers, reply)

    def _body(self, request: GenerateRequest, rid: str, *, streamed: bool) -> dict[str, Any]:
        """Return the fields of a request except `input_ids` and those of side columns."""
        interval = self._interval(request, streamed=streamed)
        params = sampling_params(request, interval if self._intervals else None)
        if self._facts and SEEDED not in self._facts:  # an old server fails on a seed
            params.pop("sampling_seed", None)
        if self._never:
            params["logit_bias"] = {**params.get("logit_bias", {}), **self._never}
        body = {
            "rid": rid,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1 if request.scored_from is None else request.scored_from - 1,
            "top_logprobs_num": request.top_logprobs,
            "stream": interval is not None,
        }
        if request.images is not None and interval in (None, _PIECE_TOKENS):
            body[ASKS] = True
        if request.adapter is not None:
            body["lora_path"] = named_adapter(request)
        return body

    def _interval(self, request: GenerateRequest, *, streamed: bool) -> int | None:
        """Tokens per part of the reply; None for the whole reply in one part."""
        sampling, turn = request.sampling, request.turn
        if request.scored_from is not None and request.images is None:
            return None
        cut = bool(sampling.stop) or (turn is not None and bool(turn.tools) and not turn.parallel_tool_calls)
        if streamed or cut:
            return self._streams.interval(request)
        whole = request.grammar is not None or (request.images is None and (sampling.max_tokens or 0) <= _PIECE_TOKENS)
        return None if whole else _PIECE_TOKENS  # an output under a grammar cannot be continued

    async def abort(self, request_id: str) -> None:
        """End a request with `FinishReason.ABORT`; unknown ids are ignored."""
        if (rid := self._rids.get(request_id)) in self._unsent:
            self._late.add(rid)
        elif rid is not None:
            await self._connection.call("/abort_request", {"rid": rid}, limit_s=_ABORT_S)

    def cut(self) -> None:
        """Abandon all replies in flight: each raises EngineLost."""
        self._connection.cut()

    def _abort_soon(self, rid: str) -> None:
        """Free a request that is no longer read. The server would take seconds to notice the closed connection."""
        task = asyncio.create_task(self._abort_quietly(rid))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self._connection.call("/abort_request", {"rid": rid}, limit_s=_ABORT_S)
        except ProxyError:
            return  # a lost server has nothing to free

    async def pause(self, mode: PauseMode) -> None:
        """Pause the server. After a pause in mode ABORT, no request is in flight on it."""
        await self._connection.call("/pause_generation", {"mode": mode.value})
        self._mode = mode
        if mode is PauseMode.ABORT:
            await self._end_late()

    async def _end_late(self) -> None:
        """End requests that reached the server just after its abort. It would hold them during the pause."""
        try:
            async with asyncio.timeout(_LATE_S):
                while self._rids:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            self._late.update(self._rids.values())
            self._connection.cut()

    async def follow(self, mode: PauseMode | None, version: int | None) -> None:
        """Note the pause and version of another process. After mode ABORT, no request of this process is in flight."""
        begins, self._mode = mode is not self._mode, mode
        if version is not None and version != self._version:
            self._now(version)
        if begins and mode is PauseMode.ABORT:
            await self._end_late()

    async def resume(self) -> None:
        """Resume the server."""
        await self._connection.call("/continue_generation")
        self._mode = None

    async def finish_update(self) -> None:
        """Do nothing: SGLang loads and names weights in one step."""

    async def update_weights(self, path: str, version: int | None = None, *, busy: bool = False) -> int:
        """Load the weights in folder `path` of the server's file system. Raises InvalidRequest if it refuses."""
        new = self._version + 1 if version is None else version
        # The cache is flushed by a separate call: a flush within the update fails, and so does the update, while an
        # aborted request is still in SGLang's queue.
        body = {"model_path": path, "weight_version": str(new), "flush_cache": False}
        await self._do("/update_weights_from_disk", body, param="path")
        self._now(new)
        if self._mode is not PauseMode.IN_PLACE or not (self._rids or busy):
            await self.flush_cache()
        return new

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass a step to the server unchanged. Raises EngineIncapable for vLLM's steps."""
        if step.of_vllm:
            raise EngineIncapable(f"SGLang has no {step.value}: the steps of its weight transfers have other names")
        await self._do(f"/{step.value}", fields)
        named = fields.get("weight_version")
        if named is not None:
            self._now(self._numbers.believe(named))
        return self._version

    @property
    def adapterless(self) -> str:
        """The reason why the server takes no LoRA adapters, with the way out; "" if it does."""
        return adapterless_by(
            self._facts,
            f"start the server {self.url} with --enable-lora --max-lora-rank RANK --lora-target-modules MODULES",
        )

    async def load_adapter(self, name: str, source: AdapterSource) -> None:
        """Load a LoRA adapter from its folder on the server's file system. Raises InvalidRequest, EngineIncapable.

        Tensors are not sent: SGLang takes them as a pickle of torch whose memory only processes of one machine share.
        """
        if self.adapterless:
            raise EngineIncapable(self.adapterless)
        most = self._facts.get("max_loaded_loras")
        if most and len(await self.adapters() - {name, self._info.model}) >= most:
            raise EngineUnavailable(
                f"{self.url} holds as many adapters as it may; unload one, or start it with more --max-loaded-loras"
            )
        try:
            await self._do("/load_lora_adapter", {"lora_name": name, "lora_path": source.path}, param="path")
        except NotServed:
            raise EngineIncapable(f"{self.url} has no /load_lora_adapter; a newer SGLang has") from None
        except InvalidRequest as error:
            if "already loaded" in error.message:
                return
            with suppress(ProxyError):  # part of its processes may have it
                await self.unload_adapter(name)
            raise

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, once the requests that run with it have ended. Unknown names are ignored."""
        try:
            await self._do("/unload_lora_adapter", {"lora_name": name})
        except InvalidRequest as error:
            if "does not exist" not in error.message:
                raise

    async def adapters(self) -> frozenset[str]:
        """The names of the model and of its adapters."""
        models = (await self._connection.probe("/v1/models") or {}).get("data") or []
        return frozenset(str(model["id"]) for model in models)

    def _serves(self, version: Any) -> int:
        """Note the version name of the server; return its number."""
        self._version = self._numbers.believe(version)
        self._newest = max(self._newest, self._version)
        return self._version

    def _now(self, version: int) -> None:
        """Note that the server has new weights. In a pause of mode RETRACT, requests continue with images for them."""
        self._serves(version)
        if self._mode is PauseMode.RETRACT:
            self._renew()

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Release GPU memory of the server. Raises EngineIncapable without --enable-memory-saver."""
        if Capability.RELEASE_MEMORY not in self.info().capabilities:
            raise EngineIncapable(f"to release memory, start the server {self.url} with --enable-memory-saver")
        await self._connection.call("/release_memory_occupation", {"tags": list(tags) or None})

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Resume released GPU memory."""
        await self._connection.call("/resume_memory_occupation", {"tags": list(tags) or None})

    async def flush_cache(self) -> None:
        """Empty the prefix cache. If necessary, requests in flight are retracted first, and then continue."""
        try:
            await self._connection.call("/flush_cache")
        except (InvalidRequest, EngineFailed):
            before = self._mode
            await self.pause(PauseMode.RETRACT)
            try:
                await self._connection.call("/flush_cache")
            finally:
                if before is None:
                    await self.resume()

    @property
    def world_size(self) -> int:
        """The number of the server's processes that have weights: tensor times pipeline parallel size."""
        return int(self._facts.get("tp_size") or 1) * int(self._facts.get("pp_size") or 1)

    @property
    def missing(self) -> list[str]:
        """The flags that the server lacks, and what that costs."""
        return missing_by(self._facts)

    def info(self) -> EngineInfo:
        """Facts about the server; valid after `start`."""
        if self._info.weight_version != self._version:
            self._info = replace(self._info, weight_version=self._version)
        return self._info

    def _described(self, context_length: int) -> EngineInfo:
        """The known facts, which do not change while the server runs, with weight version 0."""
        unrecorded = unrecorded_by(
            self._facts, self._layers, f"start the server {self.url} with --enable-return-routed-experts"
        )
        return EngineInfo(
            name="sglang",
            model=str(self._facts.get("served_model_name") or self._facts.get("model_path") or "sglang"),
            vocab_size=self._vocab_size,
            context_length=context_length,
            weight_version=0,
            capabilities=capabilities_by(self._facts) - (frozenset() if self._sight else {Capability.IMAGES}),
            detail=f"SGLang {self._facts.get('version', '')} at {self.url}",
            dtype=dtype_by(self._facts),
            quantization=str(self._facts.get("quantization") or ""),
            max_running_requests=running_by(self._facts),
            records=recorded_by(unrecorded),
            unrecorded=unrecorded,
            dense=self._layers is not None and self._layers.dense,
        )

    async def close(self) -> None:
        """Abort requests in flight and close the connections; the server keeps running."""
        await asyncio.gather(*map(self._abort_quietly, self._rids.values()), *self._background)
        await self._connection.close()

    async def _do(self, path: str, body: Mapping[str, Any], param: str | None = None) -> None:
        """Call an endpoint that reports failure as `success: false`. Raises InvalidRequest naming `param`."""
        try:
            answer = await self._connection.call(path, body)
        except EngineLost:
            raise
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param) from None
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise InvalidRequest(f"{self.url}: {answer.get('message')}", param=param)


def _new_id() -> str:
    """A request id. No id is a prefix of another, since SGLang aborts by prefix."""
    return f"{random.getrandbits(_ID_BITS):0{_ID_BITS // 4}x}"
