"""The engine protocol: token ids in, token ids and logprobs out. Engines see no text and no wire format.

Every chunk has one logprob per id; the last chunk, and only the last, has `finish`. Closing the iterator of `generate`
(or cancelling the task that reads it) frees the request in the engine. Every engine passes the checks in `contract`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import Failure, GenerateRequest
from tokengrove.options.start import Replay

MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
"""Kinds of memory that an engine may release, under SGLang's names."""


def tags_of(kinds: frozenset[str]) -> tuple[str, ...]:
    """`kinds` as engines expect them: an empty tuple for all of MEMORY_TAGS."""
    return () if kinds == frozenset(MEMORY_TAGS) else tuple(sorted(kinds))


class Capability(StrEnum):
    """Optional features of an engine. A request that needs a missing capability fails with an error that names it.

    SEED: the engine takes a seed. DETERMINISTIC: equal seeds sample equal tokens, regardless of other requests. Without
    it a seed is best effort, and the turn records that. IMAGES: the model sees `GenerateRequest.images`; an engine
    without it never receives images. ADAPTERS: it is an `AdapterEngine`, and set up to load adapters.
    PROMPT_LOGPROBS: `GenerateRequest.scored_from` is honoured. PROMPT_TEMPERATURE: also at temperatures other than 1.
    """

    GRAMMAR = "grammar"
    TOP_LOGPROBS = "top_logprobs"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    MIN_TOKENS = "min_tokens"
    SEED = "seed"
    DETERMINISTIC = "deterministic"
    UPDATE_WEIGHTS = "update_weights"
    RELEASE_MEMORY = "release_memory"
    STREAMING = "streaming"
    IMAGES = "images"
    ADAPTERS = "adapters"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PROMPT_TEMPERATURE = "prompt_temperature"


class PauseMode(StrEnum):
    """The effect of a pause on requests in flight.

    IN_PLACE: they keep their state. RETRACT: they lose their cached keys and values, which are recomputed on resume.
    ABORT: they end in the engine, and the gate resubmits them on resume. DRAIN: the pause waits until they end. Engines
    never see DRAIN: the gate waits until the engine is idle, which is then paused IN_PLACE.
    """

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"
    DRAIN = "drain"


class WeightTransfer(StrEnum):
    """Steps of a weight transfer from a trainer's processes, under SGLang's names, and then under vLLM's."""

    INIT_GROUP = "init_weights_update_group"
    DESTROY_GROUP = "destroy_weights_update_group"
    BEGIN = "begin_weight_update"
    FROM_TENSOR = "update_weights_from_tensor"
    FROM_DISTRIBUTED = "update_weights_from_distributed"
    END = "end_weight_update"
    INIT_ENGINE = "init_weight_transfer_engine"
    SHUTDOWN_ENGINE = "shutdown_weight_transfer_engine"
    START = "start_weight_update"
    UPDATE = "update_weights"
    FINISH = "finish_weight_update"

    @property
    def of_vllm(self) -> bool:
        """True for vLLM's steps, False for SGLang's."""
        return self in _OF_VLLM


_OF_VLLM = frozenset(
    {
        *(WeightTransfer.INIT_ENGINE, WeightTransfer.SHUTDOWN_ENGINE),
        *(WeightTransfer.START, WeightTransfer.UPDATE, WeightTransfer.FINISH),
    }
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a started engine.

    `vocab_size`: input ids are below it. `context_length`: the maximum of prompt plus output, in tokens.
    `weight_version`: the version that newly sampled tokens carry. `detail`: free text for people, for example device
    and dtype. `max_running_requests`: the number of requests that it runs at once, while others are queued; None if
    unknown. `records`: the side columns that it can record. `unrecorded`: why it cannot record others, with the way
    out. `dense`: the model is known to have no experts. `dtype`, `quantization`: of the weights; "" if unknown or none.
    """

    name: str
    model: str
    vocab_size: int
    context_length: int
    weight_version: int
    capabilities: frozenset[Capability]
    detail: str = ""
    max_running_requests: int | None = None
    records: frozenset[Replay] = frozenset()
    unrecorded: tuple[tuple[Replay, str], ...] = ()
    dense: bool = False
    dtype: str = ""
    quantization: str = ""

    def why_unrecorded(self, asked: Iterable[Replay]) -> tuple[Replay, str] | None:
        """The first of `asked` that the engine does not record, and why; None if it records them all.

        A dense model has no experts to record.
        """
        for each in sorted(asked):
            if each not in self.records and not (self.dense and each is Replay.EXPERTS):
                return each, dict(self.unrecorded).get(each, f"the engine {self.name!r} does not report them")
        return None


class EngineControl(Protocol):
    """A trainer's control of an engine: pauses, weights, memory and the prefix cache."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`. Raises EngineIncapable if this engine cannot pause."""

    async def resume(self) -> None:
        """Continue sampling after `pause`."""

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Load the weights in folder `path`; return their version. `version` None: the current version plus one."""

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Perform one step of a weight transfer; return the version that tokens carry from now on.

        `fields`: those of the engine's own request, unchanged. Raises EngineIncapable if this engine lacks the step.
        """

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Release memory until `resume_memory`: the kinds in `tags`, or all. No request may run in between."""

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Resume released memory: the kinds in `tags`, or all."""

    async def flush_cache(self) -> None:
        """Empty the prefix cache."""

    def info(self) -> EngineInfo:
        """Facts about the engine; valid after `start`."""


@runtime_checkable
class Engine(EngineControl, Protocol):
    """The interface between the proxy and an inference engine."""

    async def start(self) -> None:
        """Start the engine. Raises ConfigurationError if it cannot run here."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a continuation. Raises EngineFailed, EngineUnavailable or EngineTimeout.

        After EngineLost, a kind of EngineUnavailable, the gate resubmits the rest of the request.
        """

    async def abort(self, request_id: str) -> None:
        """Abort a request: it soon ends with a chunk with `FinishReason.ABORT`. Unknown ids are ignored."""

    async def close(self) -> None:
        """Free all resources. Requests in flight end with `FinishReason.ABORT`."""


@runtime_checkable
class MortalEngine(Protocol):
    """Additional interface of an engine in this process that may die while the process lives on."""

    @property
    def failure(self) -> str:
        """The reason why the engine no longer answers; "" while it runs."""


@runtime_checkable
class SessionEngine(Protocol):
    """Additional interface of an engine that keeps something of a session between its requests."""

    def forget_session(self, session_id: str) -> None:
        """Forget a session that has ended; unknown ids are ignored. A request that still runs continues."""


class AdapterSource(NamedTuple):
    """A LoRA adapter in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors.

    `path`: the folder, as the engine sees it. `config`, `tensors`: the contents of both files, if the trainer sent them
    instead of a path; the folder then holds the same files on this machine.
    """

    path: str
    config: Mapping[str, Any] | None = None
    tensors: bytes | None = None


@runtime_checkable
class AdapterEngine(Protocol):
    """Additional interface of an engine that serves several LoRA adapters of its model at once, by their versions.

    A request names one in `GenerateRequest.adapter`, and its tokens carry that version; one without samples from the
    base model. No KV cache is shared between versions, or with the base model. Loading pauses no other request.
    """

    async def load_adapter(self, version: int, source: AdapterSource) -> None:
        """Load an adapter; it may be named once this returns. Idempotent for equal sources.

        On several servers: on all, or on none. Servers that join, restart or lose it later get it before they serve a
        request that names it. Raises InvalidRequest if it does not fit the model, EngineIncapable if this engine has no
        adapters (with the way out), EngineUnavailable and EngineFailed.
        """

    async def unload_adapter(self, version: int) -> None:
        """Unload an adapter that no request names any more. Unknown versions are ignored."""


@runtime_checkable
class SharedEngine(Engine, Protocol):
    """Additional interface of an engine that several processes of one server use at once.

    `leads`: this process administers the engine, or is the only one that uses it. The other processes follow: they
    sample, and `adopt` the changes of the leading process. `busy_elsewhere`: other processes have requests in the
    engine.
    """

    leads: bool
    busy_elsewhere: bool

    def common(self) -> dict[str, Any]:
        """The state that all processes share, in JSON values: the pause, the weight version, the servers."""

    async def adopt(self, common: Mapping[str, Any]) -> None:
        """Adopt the `common` state of another process. After a restart, this is called before `start`."""


@runtime_checkable
class ServerPool(Protocol):
    """Additional interface of an engine over several servers: servers are listed, added and removed at run time."""

    @property
    def alive(self) -> bool:
        """True while a server is known to take requests."""

    def check_alive(self) -> None:
        """Raise EngineUnavailable with the reason, unless a server is known to take requests."""

    async def until_alive(self) -> None:
        """Wait until a server takes requests."""

    def has_other(self, failures: Sequence[Failure]) -> bool:
        """True if a server that is not named in `failures` takes requests."""

    def note_resubmission(self, failure: Failure) -> None:
        """Count a request that is resubmitted after this failure, for the log."""

    async def show(self) -> list[dict[str, Any]]:
        """One dict per server: url, state, failure; once reached also in_flight, served, session_count, version and
        the counts of prompt_tokens and cached_tokens."""

    async def add(self, url: str) -> None:
        """Add the server at `url`. Raises InvalidRequest if it is already in the pool or cannot join."""

    async def remove(self, url: str) -> None:
        """Send the server no more requests, and remove it after its last one. Raises InvalidRequest if unknown."""
