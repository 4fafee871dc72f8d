"""The contract for custom engines: the interface, its requests and answers, and `CHECKS`, which every engine must pass.

Experimental: it may change in a minor version. Engines run in the server, and the server's package (`proxy`) has the
definitions. They are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokengrove.server_part import server_part

if TYPE_CHECKING:
    from proxy.engine.callbacks import CallbackEngine
    from proxy.engine.chunks import TakeChunk, TokenChunk
    from proxy.engine.contract import CHECKS
    from proxy.engine.interface import (
        AdapterEngine,
        AdapterSource,
        Capability,
        Engine,
        EngineInfo,
        PauseMode,
        WeightTransfer,
    )
    from proxy.engine.requests import GenerateRequest, check_request
    from proxy.types import Ids, Logprobs, SamplingParams, ids_of
    from tokengrove.reasons import FinishReason

__all__ = [
    "CHECKS",
    "AdapterEngine",
    "AdapterSource",
    "CallbackEngine",
    "Capability",
    "Engine",
    "EngineInfo",
    "FinishReason",
    "GenerateRequest",
    "Ids",
    "Logprobs",
    "PauseMode",
    "SamplingParams",
    "TakeChunk",
    "TokenChunk",
    "WeightTransfer",
    "check_request",
    "ids_of",
]
_MODULES = {
    "engine.callbacks": ("CallbackEngine",),
    "engine.chunks": ("TakeChunk", "TokenChunk"),
    "engine.contract": ("CHECKS",),
    "engine.interface": (
        "AdapterEngine",
        "AdapterSource",
        "Capability",
        "Engine",
        "EngineInfo",
        "PauseMode",
        "WeightTransfer",
    ),
    "engine.requests": ("GenerateRequest", "check_request"),
    "types": ("Ids", "Logprobs", "SamplingParams", "ids_of"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "FinishReason":
        from tokengrove.reasons import FinishReason

        return FinishReason
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(server_part(_MODULE_OF[name]), name)
