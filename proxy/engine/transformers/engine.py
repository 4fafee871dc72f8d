"""The transformers engine: Hugging Face continuous batching with our own sampler. It needs no GPU.

Every token carries the weight version that sampled it, and keys and values are always computed with the current
weights: an update empties the prefix cache and resubmits requests in flight with their output so far. If the batching
thread dies, every request fails immediately, so none waits forever.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import MEMORY_TAGS, AdapterSource, Capability, EngineInfo, PauseMode, WeightTransfer
from proxy.engine.requests import GenerateRequest, check_request
from proxy.engine.transformers.adapter_files import Adapter
from proxy.engine.transformers.adapters import Adapters
from proxy.engine.transformers.batching import ContinuousBatch, StepEntry
from proxy.engine.transformers.expert_rows import ExpertRows, PendingExperts
from proxy.engine.transformers.experts import ExpertHooks, expert_modules, unrecognised_experts
from proxy.engine.transformers.grammar_compiler import GrammarCompiler, GrammarState
from proxy.engine.transformers.inflight import InFlight, Item, post
from proxy.engine.transformers.loading import (
    SEEING,
    choose_sizes,
    context_limit,
    end_token_ids,
    load_model,
    parse_options,
    read_weights,
)
from proxy.engine.transformers.prompt_scores import PromptScores
from proxy.engine.transformers.sampler import draw, new_row
from proxy.engine.transformers.seen_prompt import SeenPrompt
from proxy.engine.transformers.sight import Sight
from proxy.engine.transformers.weights_memory import move_to_device, move_to_host, return_freed_memory
from proxy.hub import folder_of, short_name
from proxy.settings import Settings
from proxy.vision.model_config import is_vision_model
from tokengrove.errors import (
    ConfigurationError,
    EngineFailed,
    EngineIncapable,
    EngineUnavailable,
    UnsupportedParameter,
    how_to_get,
)
from tokengrove.options.start import Replay

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WATCH_INTERVAL_S = 0.2
"""Seconds within which the death of the batching thread is detected."""

_STOP_TIMEOUT_S = 30.0
"""Limit in seconds for the current step to end when the engine closes."""

# On a CPU the time of a step grows with the number of requests; on a GPU it hardly depends on it.
_RUNNING_ON_CPU = 8


class TransformersEngine:
    """Implements `Engine` and `AdapterEngine` of `proxy.engine.interface` on the Hugging Face model in `folder`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """Parse options; load nothing yet. Raises ConfigurationError for an unknown `--engine-arg`."""
        self._settings = settings
        self._folder = folder
        self._options = parse_options(settings.engine_arg)
        self._model: Any = None
        self._device: torch.device | None = None
        self._batch: ContinuousBatch | None = None
        self._grammars: GrammarCompiler | None = None
        self._sight: Sight | None = None
        self._blind = ""
        self._experts: ExpertRows | None = None
        self._unrecognised = ""
        self._adapters: Adapters | None = None
        self._context_length = 0
        self._version = 0
        self._released: frozenset[str] = frozenset()
        self._flights: dict[str, InFlight] = {}
        self._lock = threading.Lock()  # so that submitting a request and resubmitting all requests exclude each other
        self._serials = itertools.count()
        self._down = "the engine is not started"
        # transformers counts pauses per thread, so all pauses are made on this thread.
        self._control = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokengrove-control")

    async def start(self) -> None:
        """Load the model and start the batching thread. Raises ConfigurationError."""
        if find_spec("torch") is None:
            raise ConfigurationError(
                f"the transformers engine needs the package torch: {how_to_get('tokengrove[cpu]')}"
            )
        await self._on_control(self._load)
        self._down = ""
        threading.Thread(target=self._watch, name="tokengrove-watch", daemon=True).start()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a continuation. Raises InvalidRequest, ContextLengthExceeded or EngineFailed.

        Raises EngineUnavailable if the adapter that it names is not loaded.
        """
        self._running()
        adapter = None if request.adapter is None else self._able().named(request.adapter)
        check_request(request, self._vocab_size, self._context_length)
        grammar = await asyncio.to_thread(self._compile, request) if request.grammar is not None else None
        seen = None if self._sight is None else await self._sight.see(request)
        flight = self._submit(request, grammar, seen, adapter)
        finish = None
        try:
            while finish is None:
                chunk = await flight.next_chunk()
                finish = chunk.finish
                yield chunk
        finally:
            self._release(flight)

    async def abort(self, request_id: str) -> None:
        """End a request with `FinishReason.ABORT`; unknown ids are ignored."""
        self._abort([flight for flight in self._in_flight() if flight.request.request_id == request_id])

    async def pause(self, mode: PauseMode) -> None:
        """Pause sampling. RETRACT also empties the cache, ABORT ends requests in flight; new requests wait."""
        batch = self._running()
        await self._on_control(batch.pause)
        if mode is PauseMode.RETRACT:
            await self._on_control(self._resubmit_all)
        elif mode is PauseMode.ABORT:
            self._abort(self._in_flight())

    async def resume(self) -> None:
        """Resume sampling. Raises EngineUnavailable while memory is released."""
        if self._released:
            raise EngineUnavailable(f"memory is released ({', '.join(sorted(self._released))}); resume it first")
        await self._on_control(self._running().unpause)

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Load the weights in folder `path` in place. Raises InvalidRequest if they do not fit this model."""
        self._running()
        return await self._on_control(lambda: self._replace_weights(Path(path), version))

    async def load_adapter(self, version: int, source: AdapterSource) -> None:
        """Load an adapter. Raises InvalidRequest if it does not fit the model, EngineIncapable without peft."""
        self._running()
        await asyncio.to_thread(self._able().load, version, source)

    async def unload_adapter(self, version: int) -> None:
        """Unload an adapter. Requests that have it continue with it; new ones that name it are refused."""
        if self._adapters is not None:
            self._adapters.unload(version)

    async def flush_cache(self) -> None:
        """Empty the prefix cache. Requests in flight recompute their keys and values, then continue."""
        self._running()
        await self._on_control(lambda: self._while_paused(self._resubmit_all))

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Raises EngineIncapable: this engine only loads weights from a folder."""
        raise EngineIncapable(f"the transformers engine has no {step.value}; use /engine/update_weights with a folder")

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Move the weights to host memory, and free the KV cache with its attention masks.

        On a CPU the weights already are in host memory. There are no CUDA graphs. Raises EngineUnavailable if host
        memory is insufficient; nothing is then released.
        """
        self._running()
        await self._on_control(lambda: self._while_paused(lambda: self._free(_kinds(tags) - self._released)))

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Resume released memory, in any order. Raises EngineUnavailable if memory is insufficient.

        Memory that could not be resumed is still released, and another call may resume it.
        """
        self._running()
        await self._on_control(lambda: self._while_paused(lambda: self._take_back(_kinds(tags) & self._released)))

    def info(self) -> EngineInfo:
        """Facts about the engine; valid after `start`."""
        builtin = "built-in random weights: its words are noise; " if self._settings.model is None else ""
        return EngineInfo(
            name="transformers",
            model=self._settings.served_model_name or short_name(self._settings.model or str(self._folder)),
            vocab_size=self._vocab_size,
            context_length=self._context_length,
            weight_version=self._version,
            capabilities=frozenset(Capability) - self._missing(),
            detail=f"{builtin}{self._model.dtype} on {self._device}" + self._eyesight(),
            dtype=str(self._model.dtype).removeprefix("torch."),
            quantization=_quantization(self._model.config),
            max_running_requests=_RUNNING_ON_CPU if self._device is not None and self._device.type == "cpu" else None,
            records=frozenset({Replay.KEPT, Replay.TOP_LOGPROBS} | ({Replay.EXPERTS} if self._experts else set())),
            unrecorded=((Replay.EXPERTS, self._unrecognised),) if self._unrecognised else (),
            dense=self._experts is None and not self._unrecognised,
        )

    async def close(self) -> None:
        """End requests in flight with `FinishReason.ABORT`, and stop the batching thread."""
        self._down = "the engine is closed"
        post((flight, flight.aborted(self._version)) for flight in self._in_flight())
        if self._batch is not None:
            batch = self._batch
            await self._on_control(lambda: batch.stop(_STOP_TIMEOUT_S))
        self._control.shutdown(wait=False)

    @property
    def failure(self) -> str:
        """The reason why the engine no longer answers; "" while it runs."""
        return self._down

    # The methods below run on the event loop.

    def _running(self) -> ContinuousBatch:
        if self._down or self._batch is None:
            raise EngineFailed(self._down)
        return self._batch

    def _able(self) -> Adapters:
        if self._adapters is None:
            raise EngineIncapable(f"adapters need the package peft: {how_to_get('tokengrove[peft]')}")
        return self._adapters

    def _submit(
        self,
        request: GenerateRequest,
        grammar: GrammarState | None,
        seen: SeenPrompt | None,
        adapter: Adapter | None,
    ) -> InFlight:
        stops = grammar.stop_token_ids if grammar else () if request.sampling.ignore_eos else request.stop_token_ids
        keeps = self._options.unmasked_logprobs
        row = new_row(
            *(request.sampling, request.input_ids, request.top_logprobs, grammar),
            keeps_unmasked=keeps,
            ends=tuple(stops),
            banned=() if self._sight is None else self._sight.placeholders.all,
            keeps_sets=request.columns is not None and Replay.KEPT in request.columns.replay,
        )
        with self._lock:
            flight = InFlight(request, row, frozenset(stops), f"r{next(self._serials)}", asyncio.get_running_loop())
            flight.seen, flight.adapter = seen, adapter
            if request.scored_from is not None:
                flight.scores = PromptScores(request.input_ids, request.sampling.temperature, request.top_logprobs)
            if self._experts is not None and request.columns and Replay.EXPERTS in request.columns.replay:
                flight.experts = PendingExperts(request.columns.start)
            self._flights[flight.serial] = flight
            try:
                self._send(flight)
            except EngineFailed:
                del self._flights[flight.serial]
                raise
        return flight

    def _release(self, flight: InFlight) -> None:
        with self._lock:
            self._flights.pop(flight.serial, None)
            if not flight.finished and self._batch is not None:
                self._batch.cancel(flight.serial)

    def _abort(self, flights: Sequence[InFlight]) -> None:
        for flight in flights:
            flight.finished = True
            if self._batch is not None:
                self._batch.cancel(flight.serial)
        post((flight, flight.aborted(self._version)) for flight in flights)

    def _in_flight(self) -> list[InFlight]:
        with self._lock:
            return list(self._flights.values())

    async def _on_control(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._control, work)

    # The methods below run on any thread.

    @property
    def _model_device(self) -> torch.device:
        assert self._device is not None
        return self._device

    def _send(self, flight: InFlight) -> None:
        """Submit the prompt and the output so far to the batch. Raises EngineFailed."""
        prompt = flight.request.input_ids if flight.seen is None else flight.seen.ids
        ids = [*prompt, *flight.output]
        stops, limit = sorted(flight.stop_token_ids), flight.row.remaining
        scored_from = None if flight.output else flight.request.scored_from
        self._running().submit(flight.serial, ids, limit, stops, flight.seen, flight.adapter, scored_from)

    def _compile(self, request: GenerateRequest) -> GrammarState:
        if self._grammars is None or request.grammar is None:
            raise UnsupportedParameter(
                f"constrained output needs the package llguidance: {how_to_get('tokengrove[cpu]')}", param="tools"
            )
        return self._grammars.compile(request.grammar, request.stop_token_ids or end_token_ids(self._model))

    @property
    def _vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    def _eyesight(self) -> str:
        return "; sees images" if self._sight is not None else f"; {self._blind}" if self._blind else ""

    def _missing(self) -> frozenset[Capability]:
        parts = {
            Capability.GRAMMAR: self._grammars,
            Capability.IMAGES: self._sight,
            Capability.ADAPTERS: self._adapters,
        }
        return frozenset(each for each, part in parts.items() if part is None)

    def _weights(self) -> list[torch.Tensor]:
        adapted = () if self._adapters is None else self._adapters.tensors()
        return [*self._model.parameters(), *self._model.buffers(), *adapted]

    # The methods below run on the control thread.

    def _load(self) -> None:
        self._model = load_model(self._folder, self._options)
        self._device = self._model.device
        sizes = choose_sizes(self._model, self._settings, self._options)
        bounds = [context_limit(self._model), sizes.cache_tokens]
        self._context_length = min([*bounds, self._settings.max_context_tokens or sizes.cache_tokens])
        if find_spec("llguidance") is not None:
            named = self._settings.tokenizer
            folder = self._folder if named is None else folder_of("tokenizer", named)
            self._grammars = GrammarCompiler(folder, self._vocab_size)
        self._batch = ContinuousBatch(self._model, sizes, self._step)
        self._sight = self._open_eyes(self._batch)
        if modules := expert_modules(self._model):
            self._experts = ExpertRows(ExpertHooks(modules), self._batch)
        else:
            self._unrecognised = unrecognised_experts(self._model)
        if find_spec("peft") is not None:
            self._adapters = Adapters(self._model, self._batch)
        self._batch.start()

    def _open_eyes(self, batch: ContinuousBatch) -> Sight | None:
        """The sight of a vision model, or None. No sight is not an error, since the model still answers text."""
        if not is_vision_model(self._folder):
            return None
        kind = self._model.config.model_type
        if kind not in SEEING:
            self._blind = f"the transformers engine shows no images to models of the kind {kind}"
        else:
            try:
                return Sight(self._model, self._folder, self._options.image_cache_mb, batch.entries)
            except ConfigurationError as error:
                self._blind = str(error)
        return None

    def _replace_weights(self, folder: Path, version: int | None) -> int:
        weights = read_weights(folder, self._model)

        def swap() -> None:
            self._model.load_state_dict(weights)
            if self._sight is not None:
                self._sight.images.forget()
            self._version = self._version + 1 if version is None else version
            self._resubmit_all()

        self._while_paused(swap)
        return self._version

    def _free(self, kinds: frozenset[str]) -> None:
        batch, device = self._running(), self._model_device
        if "weights" in kinds:
            try:
                move_to_host(self._weights(), device)
            except RuntimeError as error:
                raise EngineUnavailable(f"the weights do not fit into the host's memory: {error}") from error
        if "kv_cache" in kinds:
            self._resubmit_all()
            batch.free_cache()
        if self._sight is not None:
            self._sight.images.forget()
        self._released |= kinds
        return_freed_memory(device)

    def _take_back(self, kinds: frozenset[str]) -> None:
        batch, device = self._running(), self._model_device
        try:
            if "weights" in kinds:
                move_to_device(self._weights(), device)
            if "kv_cache" in kinds:
                batch.allocate_cache(device)
        except RuntimeError as error:
            raise EngineUnavailable(f"memory cannot be taken back yet: {error}") from error
        self._released -= kinds

    def _while_paused(self, work: Callable[[], None]) -> None:
        batch = self._running()
        was_paused = batch.paused
        batch.pause()
        try:
            work()
        finally:
            if not was_paused:
                batch.unpause()

    def _resubmit_all(self) -> None:
        """Empty the cache and resubmit every request with its output so far. The batching thread must be parked.

        A request that has not reached the scheduler yet may take one more step under its old serial. `_step` ignores
        unknown serials, and the cancellation then frees the request.
        """
        batch = self._running()
        batch.forget()
        if self._sight is not None:
            self._sight.images.emptied()
        if self._experts is not None:
            self._experts.forget()
        with self._lock:
            for flight in [*self._flights.values()]:
                batch.cancel(flight.serial)
                del self._flights[flight.serial]
                flight.serial = f"r{next(self._serials)}"
                flight.start_again()
                self._flights[flight.serial] = flight
                if not flight.finished:
                    self._send(flight)

    # The methods below run on the batching thread.

    def _step(self, entries: Sequence[StepEntry], logits: torch.Tensor, scored: torch.Tensor) -> list[int]:
        """Sample a token for each entry that takes one, and post them to the readers. `scored`: logits of prompts."""
        takers = [self._flights.get(entry.serial) for entry in entries if entry.takes_token]
        for entry in entries:
            flight = self._flights.get(entry.serial)
            if flight is not None and not flight.output:
                flight.processed += entry.processed
        if self._experts is not None:
            self._note_experts(self._experts, entries)
        if len(scored):
            self._note_scores(entries, scored)
        known = [(place, flight) for place, flight in enumerate(takers) if flight is not None]
        tokens = [0] * len(takers)
        if known:
            drawn = draw(logits[[place for place, _ in known]], [flight.row for _, flight in known])
            for (place, _), token in zip(known, drawn, strict=True):
                tokens[place] = token.token
            post((flight, self._item(flight, token)) for (_, flight), token in zip(known, drawn, strict=True))
        return tokens

    def _note_scores(self, entries: Sequence[StepEntry], logits: torch.Tensor) -> None:
        at = 0
        for entry in entries:
            if positions := entry.scored:
                flight, end = self._flights.get(entry.serial), at + len(positions)
                if flight is not None and flight.scores is not None:
                    flight.scores.add(logits[at:end], positions[0] + 1)
                at = end

    def _note_experts(self, experts: ExpertRows, entries: Sequence[StepEntry]) -> None:
        rows, at = experts.take(entries), 0
        for entry in entries:
            flight = self._flights.get(entry.serial)
            if flight is not None and flight.experts is not None:
                flight.experts.add(experts, entry, None if rows is None else rows[at : at + entry.processed])
            at += entry.processed

    def _item(self, flight: InFlight, drawn: Any) -> Item:
        unseen = None if self._sight is None or flight.seen is None else self._sight.failure(flight.seen)
        unapplied = "" if self._adapters is None or flight.adapter is None else self._adapters.failure(flight.adapter)
        if drawn.failure is None and unseen is None and not unapplied:
            return flight.take(drawn, self._version)
        return EngineFailed(unseen or unapplied or f"no token could be sampled: {drawn.failure}")

    # The methods below run on the watching thread.

    def _watch(self) -> None:
        """Fail requests that fail in the batch, and all requests once the batching thread has ended."""
        batch = self._batch
        assert batch is not None
        while batch.alive:
            failure = batch.next_failure(_WATCH_INTERVAL_S)
            if failure is not None:
                self._fail(*failure)
            if not threading.main_thread().is_alive():  # the process exits without `close`: do not keep it alive
                batch.stop(_STOP_TIMEOUT_S)
        if not self._down:
            self._down = batch.reason_of_death
            logger.critical("engine is dead", {"reason": self._down})
        post((flight, EngineFailed(self._down)) for flight in self._in_flight())

    def _fail(self, serial: str, reason: str) -> None:
        flight = self._flights.get(serial)
        if flight is not None:
            flight.end(EngineFailed(f"the engine aborted the request: {reason}"))


def _quantization(config: Any) -> str:
    """The method of quantisation in the config of a model; "" without one."""
    told = getattr(config, "quantization_config", None)
    method = told.get("quant_method") if isinstance(told, dict) else getattr(told, "quant_method", None)
    return str(getattr(method, "value", method) or "")


def _kinds(tags: Sequence[str]) -> frozenset[str]:
    """The kinds of memory that `tags` name; all kinds by default."""
    return frozenset(tags or MEMORY_TAGS)
