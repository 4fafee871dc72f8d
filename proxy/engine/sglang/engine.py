"""`sglang.Engine` in this process, with its scheduler in a child process.

Input ids are first checked against the vocabulary, since an id outside of it would crash the scheduler and this
process. With data parallelism, a session stays on its rank, where its prefix is cached.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

from proxy.engine.adapter_names import adapter_digest, adapter_name, is_named_by
from proxy.engine.arguments import parse_arguments
from proxy.engine.callbacks import generated
from proxy.engine.chunks import TakeChunk, TokenChunk, of_adapter, once_counted
from proxy.engine.expert_layers import expert_layers
from proxy.engine.interface import AdapterSource, Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest, check_request
from proxy.engine.scored_prompt import sample_scores
from proxy.engine.sglang.facts import (
    EXPERTS_FLAG,
    adapterless_by,
    capabilities_by,
    recorded_by,
    running_by,
    unrecorded_by,
)
from proxy.engine.sglang.image_inputs import ImageInputs
from proxy.engine.sglang.option_names import option_names
from proxy.engine.sglang.replay import ReplayPlan, refuses_masks, replay_plan, without_masks
from proxy.engine.sglang.scheduler import run_scheduler
from proxy.engine.sglang.scores import scored_prompt
from proxy.engine.sglang.wire import SglangReply, sampling_params
from proxy.engine.streams import Streams
from proxy.engine.version_names import VersionNumbers
from proxy.hub import folder_of, short_name
from proxy.settings import Settings
from proxy.types import Logprobs, ids_of
from proxy.vision.model_config import is_vision_model, placeholder_ids
from proxy.vision.processor import VisionProcessor
from tokengrove.errors import (
    ConfigurationError,
    EngineFailed,
    EngineIncapable,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
    UnsupportedParameter,
)
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

logger = logging.getLogger(__name__)

_TENSORS = "serialized_named_tensors"
_RESERVED_TOKENS = 4
"""Added to `max_req_input_len`, which is 5 tokens below SGLang's longest request, of which one token stays free."""

_LATE_S = 2.0
"""Seconds for the last part of a reply to arrive after its abort."""

_REMEMBERED_SESSIONS = 65_536
_LORA_FLAGS = (
    "start with --engine-arg enable_lora=true --engine-arg max_lora_rank=RANK "
    "--engine-arg 'lora_target_modules=[\"all\"]'"
)
_IMAGE_WORKERS = "mm_processor_worker_num"


class SglangEngine:
    """Implements `proxy.engine.interface.Engine` with the model in `folder`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder, self._layers = folder, expert_layers(folder)
        self._engine: Any = None
        self._numbers, self._streams = VersionNumbers(), Streams(settings.stream_interval)
        self._version = self._newest = 0
        self._mode: PauseMode | None = None
        self._facts: dict[str, Any] = {}
        self._info: EngineInfo | None = None
        self._intervals = False
        self._ranks = Ranks(1)
        self._readers = 0
        self._images: ImageInputs | None = None
        self._coming: set[str] = set()
        self._adapters: dict[int, tuple[str, str]] = {}
        self._loading = asyncio.Lock()
        self._told_of_masks = False

    async def start(self) -> None:
        """Load the model, which takes seconds to minutes. Raises ConfigurationError."""
        arguments = sglang_arguments(self._settings, self._folder)
        try:
            import sglang
            from sglang.srt.entrypoints.engine import Engine
            from sglang.srt.sampling.sampling_params import SamplingParams

            run = partial(run_scheduler, never_sampled=placeholder_ids(self._folder))
            watched = type("WatchedEngine", (Engine,), {"run_scheduler_process_func": staticmethod(run)})
            self._engine = watched(**arguments)
        except (ImportError, TypeError, ValueError, RuntimeError, OSError) as error:
            raise ConfigurationError(f"the SGLang engine cannot start: {error}") from error
        # Otherwise the first request would create it and replace the server's signal handlers.
        self._manager.auto_create_handle_loop()
        self._intervals = "stream_interval" in _fields(SamplingParams)
        states = await self._manager.get_internal_state()
        self._facts = {"version": sglang.__version__, **states[0], "internal_states": states}
        self._ranks = Ranks(int(self._facts["dp_size"]))
        if _sees(self._manager):
            processor = await asyncio.to_thread(VisionProcessor.load, self._folder)
            self._images = ImageInputs(processor, getattr(self._manager.model_config, "dtype", None))
        self._info = self._describe()

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same as `sample`, as a generator."""
        return generated(self.sample, request)

    async def sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        """Sample a continuation. Raises InvalidRequest, ContextLengthExceeded, EngineUnavailable or EngineFailed."""
        if request.scored_from is not None:
            return await sample_scores(self._sample, request, take, lambda: self._version)
        return await self._sample(request, take)

    async def _sample(self, request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
        info = self.info()
        if request.adapter is not None:
            if request.adapter not in self._adapters:
                raise EngineUnavailable(f"adapter version {request.adapter} is not loaded")
            take = of_adapter(take, request.adapter)
        check_request(request, info.vocab_size, info.context_length)
        images = None
        if request.images is not None and (images := await self._image_data(request)) is None:
            aborted = TokenChunk(ids_of(), Logprobs("f"), self._version, FinishReason.ABORT)
            return take(aborted) or FinishReason.ABORT
        told = ids_of()

        def collect(chunk: TokenChunk) -> FinishReason | None:
            told.extend(chunk.ids)
            return take(chunk)

        try:
            return await self._sampled(request, collect, images, self._planned(request))
        except (InvalidRequest, EngineFailed) as error:
            if not refuses_masks(error.message) or (told and (images is not None or request.grammar is not None)):
                raise
            self._tell_of_masks(error)
        rest = without_masks(request, told)
        return await self._sampled(rest, once_counted(take) if told else take, images, self._planned(rest))

    def _tell_of_masks(self, error: ProxyError) -> None:
        """Log once that SGLang has refused to report kept sets."""
        if not self._told_of_masks:
            self._told_of_masks = True
            logger.warning(
                "SGLang does not report the kept sets of a request, which runs without: %(reason)s",
                {"reason": error.message},
            )

    def _planned(self, request: GenerateRequest) -> ReplayPlan | None:
        """The side columns that SGLang gives for a request."""
        info = self.info()
        bans = self._images is not None
        return replay_plan(request, info.records, self._layers, self._facts, vocab_size=info.vocab_size, bans=bans)

    async def _sampled(
        self,
        request: GenerateRequest,
        take: TakeChunk,
        images: list[dict[str, Any]] | None,
        plan: ReplayPlan | None,
    ) -> FinishReason | None:
        """Sample in one request of SGLang. `plan`: its side columns. Raises InvalidRequest or EngineFailed.

        If `take` ends the output, the experts still arrive with the last part, so it is waited for, a while.
        """
        rank = self._ranks.take(request.session_id)
        scored = None if request.scored_from is None else scored_prompt(request, self.info().vocab_size)
        answer = SglangReply(self._numbers, len(request.prompt), version=self._version, plan=plan, scored=scored)
        wanted = self._input(request, rank, images, plan)
        stopped: FinishReason | None = None
        self._readers += 1
        self._streams.running += request.streamed
        try:
            async with asyncio.timeout(None) as limit, aclosing(self._manager.generate_request(wanted, None)) as parts:
                async for part in parts:
                    ended_before = stopped is not None
                    for chunk in answer.read((part,), self._version, self._newest):
                        if stopped is None:
                            stopped = take(chunk)
                        elif chunk.columns is not None:
                            take(TokenChunk(ids_of(), Logprobs("f"), chunk.version, columns=chunk.columns))
                    if stopped is None or ended_before or answer.finish is not None:
                        continue
                    if answer.rows is None or not answer.rows.lacks_experts:
                        break
                    limit.reschedule(asyncio.get_running_loop().time() + _LATE_S)
                    self._manager.abort_request(rid=wanted.rid)
        except TimeoutError:
            if stopped is None:
                raise
        except ValueError as error:
            message = f"the engine refused the request: {error}"
            raise InvalidRequest(message).showing("the engine refused the request") from None
        finally:
            self._readers -= 1
            self._streams.running -= request.streamed
            self._ranks.give_back(rank)
        return stopped or answer.finish

    async def abort(self, request_id: str) -> None:
        """End a request with `FinishReason.ABORT`; unknown ids are ignored."""
        self._coming.discard(request_id)
        for rid in [rid for rid in self._manager.rid_to_state if rid.endswith(f":{request_id}")]:
            self._manager.abort_request(rid=rid)

    async def pause(self, mode: PauseMode) -> None:
        """Pause: requests stay in place, are retracted to the queue (without their cache), or end. New ones wait."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._mode = mode
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode.value))

    async def resume(self) -> None:
        """Resume sampling."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._mode = None

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Load the weights in folder `path`. Raises InvalidRequest if they do not fit this model, or EngineFailed.

        Requests paused IN_PLACE, and the prefix cache, keep the keys and values of the old weights; a pause in mode
        RETRACT recomputes them.
        """
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        if not (Path(path) / "config.json").is_file():
            raise InvalidRequest(f"{path} is not a Hugging Face model folder (it has no config.json)", param="path")
        new = self._version + 1 if version is None else version
        # The cache is flushed by a separate call. Within the update, SGLang cannot flush it while an aborted request is
        # still in its queue; it then reports a failure although the new weights are in place.
        update = UpdateWeightFromDiskReqInput(model_path=path, weight_version=str(new), flush_cache=False)
        done, message, *_ = await self._manager.update_weights_from_disk(update, None)
        if not done:
            raise InvalidRequest(f"the weights in {path} were not loaded: {message}", param="path")
        self._now(new)
        if self._mode is not PauseMode.IN_PLACE or not self._readers:
            await self.flush_cache()
        return new

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass a step to SGLang. Tensors are in SGLang's serialisation, as base64.

        Raises InvalidRequest, and EngineIncapable for vLLM's steps.
        """
        if step.of_vllm:
            raise EngineIncapable(f"SGLang has no {step.value}: the steps of its weight transfers have other names")
        from sglang.srt.managers import io_struct

        name = "".join(word.capitalize() for word in step.value.split("_")) + "ReqInput"
        values = dict(fields)
        if step is WeightTransfer.FROM_TENSOR:
            values[_TENSORS] = tensors_of(fields)
        try:
            body = getattr(io_struct, name)(**values)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{step.value}: {error}") from None
        done, message, *_ = await getattr(self._manager, step.value)(body, None)
        if not done:
            raise InvalidRequest(f"{step.value}: {message}")
        named = fields.get("weight_version")
        return self._version if named is None else self._now(self._numbers.believe(named))

    async def load_adapter(self, version: int, source: AdapterSource) -> None:
        """Load a LoRA adapter from its folder. Raises InvalidRequest, and EngineIncapable without enable_lora."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        if why := adapterless_by(self._facts, _LORA_FLAGS):
            raise EngineIncapable(why)
        async with self._loading:
            digest = await asyncio.to_thread(adapter_digest, source.path)
            if digest is None:
                raise InvalidRequest(
                    f"{source.path} is not a LoRA adapter (it has no adapter_config.json)", param="path"
                )
            if (known := self._adapters.get(version)) is not None:
                if known[1] == source.path and is_named_by(known[0], digest):
                    return
                raise InvalidRequest(
                    f"adapter version {version} is loaded with other contents, from {known[1]}; give the new adapter "
                    "another version",
                    param="version",
                )
            name = adapter_name(version, digest)
            load = LoadLoRAAdapterReqInput(lora_name=name, lora_path=source.path)
            loaded = await self._manager.load_lora_adapter(load, None)
            if not loaded.success:
                await self._unload(name)  # part of its processes may have it
                raise InvalidRequest(
                    f"the adapter in {source.path} was not loaded: {loaded.error_message}", param="path"
                )
            self._adapters[version] = name, source.path

    async def unload_adapter(self, version: int) -> None:
        """Unload an adapter, once the requests that run with it have ended. Unknown versions are ignored."""
        async with self._loading:
            if (known := self._adapters.get(version)) is None:
                return
            if error := await self._unload(known[0]):
                raise EngineFailed(f"adapter version {version} was not unloaded: {error}")
            del self._adapters[version]

    async def _unload(self, name: str) -> str:
        """Unload an adapter by its name; return what SGLang says if it fails, else ""."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        unloaded = await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name), None)
        return "" if unloaded.success else str(unloaded.error_message)

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Release GPU memory. Raises EngineIncapable without `--engine-arg enable_memory_saver=true`."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        self._check_memory_saver()
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(tags) or None), None)

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Resume released GPU memory."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        self._check_memory_saver()
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=list(tags) or None), None)

    async def flush_cache(self) -> None:
        """Empty the prefix cache. If necessary, requests in flight are retracted first, and then continue."""
        if (await self._manager.flush_cache()).success:
            return
        before = self._mode
        await self.pause(PauseMode.RETRACT)
        done = (await self._manager.flush_cache()).success
        if before is None:
            await self.resume()
        if not done:
            raise EngineFailed("the engine did not flush its prefix cache")

    def info(self) -> EngineInfo:
        """Facts about the engine; valid after `start`."""
        if self._info is None:
            raise EngineFailed("the engine is not started")
        return self._info

    async def close(self) -> None:
        """Abort all requests and stop the scheduler process."""
        if self._engine is not None:
            self._manager.abort_request(abort_all=True)
            await asyncio.to_thread(self._engine.shutdown)
            self._engine = None

    @property
    def _manager(self) -> Any:
        if self._engine is None:
            raise EngineFailed("the engine is closed")
        return self._engine.tokenizer_manager

    async def _image_data(self, request: GenerateRequest) -> list[dict[str, Any]] | None:
        """Return the images of a request in SGLang's form, or None if it has been aborted."""
        if self._images is None or request.images is None:
            raise UnsupportedParameter(f"SGLang does not see with the model {self.info().model!r}", param="messages")
        self._coming.add(request.request_id)
        try:
            data = await self._images.of(request.images, request.input_ids)
            return data if request.request_id in self._coming else None
        finally:
            self._coming.discard(request.request_id)

    def _input(
        self,
        request: GenerateRequest,
        rank: int | None,
        images: list[dict[str, Any]] | None,
        plan: ReplayPlan | None,
    ) -> Any:
        from sglang.srt.managers.io_struct import GenerateReqInput

        interval = self._streams.interval(request) if self._intervals else None
        return GenerateReqInput(
            # SGLang aborts every request with an id that begins with the given id: no id may be a prefix of another.
            rid=f"{uuid.uuid4().hex}:{request.request_id}",
            input_ids=request.input_ids.tolist(),
            image_data=images,
            sampling_params=sampling_params(request, interval),
            return_logprob=True,
            logprob_start_len=-1 if request.scored_from is None else request.scored_from - 1,
            top_logprobs_num=request.top_logprobs,
            stream=True,
            routed_dp_rank=rank,
            lora_path=None if request.adapter is None else self._adapters[request.adapter][0],
            **({} if plan is None else plan.fields(len(request.prompt))),
        )

    def _now(self, version: int) -> int:
        self._version = self._numbers.believe(version)
        self._newest = max(self._newest, self._version)
        self._info = self._describe()
        return version

    def _describe(self) -> EngineInfo:
        facts, model, blind = self._facts, self._manager.model_config, self._images is None
        dtype = str(model.dtype).removeprefix("torch.")
        unrecorded = unrecorded_by(facts, self._layers, f"start with --engine-arg {EXPERTS_FLAG}=true")
        longest = int(self._engine._scheduler_init_result.scheduler_infos[0]["max_req_input_len"])
        return EngineInfo(
            name="sglang",
            model=self._settings.served_model_name or short_name(self._settings.model or str(self._folder)),
            vocab_size=int(model.vocab_size),
            context_length=longest + _RESERVED_TOKENS,
            weight_version=self._version,
            capabilities=capabilities_by(facts) - ({Capability.IMAGES} if blind else set()),
            detail=f"SGLang on {facts['device']}, {dtype}, tp {facts['tp_size']}, dp {facts['dp_size']}",
            dtype=dtype,
            quantization=str(facts.get("quantization") or ""),
            max_running_requests=running_by(facts),
            records=recorded_by(unrecorded),
            unrecorded=unrecorded,
            dense=self._layers is not None and self._layers.dense,
        )

    def _check_memory_saver(self) -> None:
        if Capability.RELEASE_MEMORY not in self.info().capabilities:
            raise EngineIncapable("to release memory, start with --engine-arg enable_memory_saver=true")


class Ranks:
    """Placement of sessions on data-parallel ranks. A known session keeps its rank; a new one gets the least loaded."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._of_session: OrderedDict[str, int] = OrderedDict()
        self._load: Counter[int] = Counter()

    def take(self, session_id: str) -> int | None:
        """Return the rank for a request; None if there is only one. Call `give_back` when the request ends."""
        if self._size < 2:
            return None
        rank = self._of_session.get(session_id) if session_id else None
        if rank is None:
            sessions = Counter(self._of_session.values())
            rank = min(range(self._size), key=lambda r: (self._load[r], sessions[r], r))
        if session_id:
            self._of_session[session_id] = rank
            self._of_session.move_to_end(session_id)
            if len(self._of_session) > _REMEMBERED_SESSIONS:
                self._of_session.popitem(last=False)
        self._load[rank] += 1
        return rank

    def give_back(self, rank: int | None) -> None:
        """Note the end of a request on `rank`."""
        if rank is not None:
            self._load[rank] -= 1


def sglang_arguments(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return the keyword arguments of `sglang.Engine`.

    `--engine-arg key=value` overrides the other settings; a JSON value is parsed. Raises ConfigurationError for an
    argument without `=`.
    """
    arguments: dict[str, Any] = {
        "model_path": str(folder),
        "log_level": "error" if settings.log_level == "info" else settings.log_level,
        "weight_version": "0",
    }
    if is_vision_model(folder) and _IMAGE_WORKERS in (option_names() or ()):
        arguments[_IMAGE_WORKERS] = 2  # with one, SGLang processes images on the event loop
    if settings.tokenizer is not None:
        arguments["tokenizer_path"] = str(folder_of("tokenizer", settings.tokenizer))
    if settings.max_context_tokens is not None:
        arguments["context_length"] = settings.max_context_tokens
    if Replay.EXPERTS in settings.replay and not _is_dense(folder) and EXPERTS_FLAG in (option_names() or ()):
        arguments[EXPERTS_FLAG] = True
    for key, value in parse_arguments(settings.engine_arg).items():
        arguments[key.replace("-", "_")] = _value(value)
    return arguments


def _is_dense(folder: Path) -> bool:
    layers = expert_layers(folder)
    return layers is not None and layers.dense


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def _sees(manager: Any) -> bool:
    """True if SGLang has loaded the model as a vision model."""
    understands = getattr(manager.model_config, "is_image_understandable_model", False)
    return bool(understands) and getattr(manager, "mm_processor", None) is not None


def _fields(struct: Any) -> frozenset[str]:
    return frozenset(getattr(struct, "__struct_fields__", ()) or getattr(struct, "__dataclass_fields__", ()))


def tensors_of(fields: Mapping[str, Any]) -> list[bytes]:
    """Decode the serialised tensors of a step, one per process. Raises InvalidRequest if they are not base64."""
    texts = fields.get(_TENSORS)
    try:
        if not isinstance(texts, list):
            raise TypeError
        return [text if isinstance(text, bytes) else base64.b64decode(text, validate=True) for text in texts]
    except (TypeError, ValueError):
        raise InvalidRequest(f"'{_TENSORS}' must be a list of base64 texts, one per process", param=_TENSORS) from None
