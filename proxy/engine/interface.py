"""What every engine is: token in, token out. No text to tokenise, no wire format.

Every chunk has as many logprobs as ids; the last chunk, and only it, has `finish`. Closing the iterator of `generate`
(or cancelling the task that reads it) frees the request in the engine. All engines pass the suite in `contract.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest

MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
"""The kinds of memory that can be released, by SGLang's names for them."""


class Capability(StrEnum):
    """What not every engine can do; a request that needs a missing one is refused by name."""

    GRAMMAR = "grammar"
    TOP_LOGPROBS = "top_logprobs"
    PENALTIES = "penalties"
    LOGIT_BIAS = "logit_bias"
    SEED = "seed"
    UPDATE_WEIGHTS = "update_weights"
    RELEASE_MEMORY = "release_memory"
    STREAMING = "streaming"


class PauseMode(StrEnum):
    """What a pause does to requests in flight: they keep their state, lose their cache, end, or are waited for.

    Engines never see DRAIN: the gate waits itself, and then pauses an engine that runs nothing.
    """

    IN_PLACE = "in_place"
    RETRACT = "retract"
    ABORT = "abort"
    DRAIN = "drain"


class WeightTransfer(StrEnum):
    """The steps of handing weights over from a trainer's processes, by SGLang's names for them."""

    INIT_GROUP = "init_weights_update_group"
    DESTROY_GROUP = "destroy_weights_update_group"
    BEGIN = "begin_weight_update"
    FROM_TENSOR = "update_weights_from_tensor"
    FROM_DISTRIBUTED = "update_weights_from_distributed"
    END = "end_weight_update"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that hold while the engine runs. `vocab_size` bounds input ids; `context_length` is prompt plus output."""

    name: str
    model: str
    vocab_size: int
    context_length: int
    weight_version: int
    capabilities: frozenset[Capability]
    detail: str = ""


@runtime_checkable
class Engine(Protocol):
    """The one interface between the proxy and anything that samples tokens."""

    async def start(self) -> None:
        """Become ready to generate. Raises ConfigurationError when the engine cannot run here."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Sample a continuation. Raises EngineFailed, EngineUnavailable or EngineTimeout."""

    async def abort(self, request_id: str) -> None:
        """End a request soon; its iterator finishes with `FinishReason.ABORT`. Unknown ids are ignored."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. Raises EngineIncapable when this engine cannot."""

    async def resume(self) -> None:
        """Go on sampling after `pause`."""

    async def update_weights(self, path: str, version: int | None = None) -> int:
        """Load the weights in folder `path`; returns the version that tokens carry from now on."""

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass a step of a transfer on as it is; returns the version that tokens carry from now on.

        `fields` are SGLang's own. Raises EngineIncapable when this engine has no such thing.
        """

    async def release_memory(self, tags: Sequence[str] = ()) -> None:
        """Give memory back until `resume_memory`: weights and cache, or what `tags` name. Nothing runs meanwhile."""

    async def resume_memory(self, tags: Sequence[str] = ()) -> None:
        """Take the memory again."""

    async def flush_cache(self) -> None:
        """Forget cached prefixes."""

    def info(self) -> EngineInfo:
        """What runs here; valid after `start`."""

    async def close(self) -> None:
        """Free everything. Requests in flight end with `FinishReason.ABORT`."""


@runtime_checkable
class ServerPool(Protocol):
    """What an engine over several servers offers beside `Engine`: its servers can be listed, added and removed."""

    def check_alive(self) -> None:
        """Raise EngineUnavailable when no server takes requests, as far as is known."""

    def servers(self) -> list[dict[str, Any]]:
        """Each server as a dict: url, state, in_flight, served, sessions, weight_version, failure."""

    async def add(self, url: str) -> None:
        """Add the server at `url`. Raises InvalidRequest if it is in the pool already or cannot join."""

    async def remove(self, url: str) -> None:
        """Send the server no more requests and drop it after its last one. Raises InvalidRequest if unknown."""
