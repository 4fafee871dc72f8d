"""The protocol of an engine server in a pool: an engine at a URL, which is probed and may be lost."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from proxy.engine.callbacks import CallbackEngine
from proxy.engine.interface import AdapterSource, Engine, PauseMode
from proxy.engine.requests import GenerateRequest
from tokengrove.errors import EngineFailed, EngineLost, EngineUnavailable, ProxyError

_MALFORMED = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""The exceptions of reading an answer of an unexpected form."""


class AdapterLost(EngineLost):
    """The server does not have the LoRA adapter that a request names, for example because it was restarted."""


@runtime_checkable
class RemoteEngine(Engine, CallbackEngine, Protocol):
    """An engine at `url`. Every call may raise EngineLost.

    `blind`: the reason why it takes no images of a vision model, else "". `missing`: what the server lacks because of
    flags that it was started without, and what that costs; a sentence each. `compared`: it was found to serve the model
    of the proxy; False if it cannot be compared. `adapterless`: the reason why it takes no LoRA adapters, with the way
    out, else "". A request with an adapter that the server does not have raises AdapterLost.
    """

    url: str
    blind: str
    compared: bool

    @property
    def missing(self) -> list[str]: ...

    @property
    def adapterless(self) -> str: ...

    @property
    def world_size(self) -> int:
        """The number of processes that have weights: the number of ranks of the server in a weight transfer group."""

    async def check(self) -> int:
        """Return the weight version that the server serves. Raises EngineLost if it does not answer."""

    async def finish_update(self) -> None:
        """Finish an update of weights that a process began and did not finish. Raises EngineLost, EngineUnavailable."""

    async def update_weights(self, path: str, version: int | None = None, *, busy: bool = False) -> int:
        """Load weights as in every engine. `busy`: other processes also have requests on the server."""

    async def follow(self, mode: PauseMode | None, version: int | None) -> None:
        """Note that another process has paused the server in `mode` (None: it runs), and set its weight `version`.

        Raises EngineIncapable if it cannot keep the requests of this process through the pause.
        """

    async def rests(self) -> bool:
        """True if the server reports that it is paused. False if it cannot report pauses. Raises EngineLost."""

    async def load_adapter(self, name: str, source: AdapterSource) -> None:
        """Load a LoRA adapter under a name that no other adapter ever had. Idempotent.

        Raises InvalidRequest if the server refuses it, and EngineIncapable if it takes no adapters.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Unknown names are ignored."""

    async def adapters(self) -> frozenset[str]:
        """The names of the adapters that the server has, possibly with those of models. Raises EngineLost."""

    def cut(self) -> None:
        """Abandon all replies in flight without notifying the server: each raises EngineLost."""


def named_adapter(request: GenerateRequest) -> str:
    """The name of the adapter of a request; "" for the base model. Raises EngineFailed for an adapter without a name.

    Without its name, the base model would sample.
    """
    if request.adapter is not None and not request.adapter_name:
        raise EngineFailed(f"a request for adapter version {request.adapter} reached an engine server without its name")
    return request.adapter_name if request.adapter is not None else ""


def adapter_fault(url: str, request: GenerateRequest, error: ProxyError) -> ProxyError:
    """`error`, or AdapterLost if the server refused a request because it does not have the adapter that this names."""
    if (name := named_adapter(request)) and name in error.message:
        return AdapterLost(f"{url} does not have adapter version {request.adapter}")
    return error


async def started(engine: RemoteEngine) -> RemoteEngine:
    """Read the facts about a server, again if it was restarted, and return its engine.

    Raises the errors of `start`, and EngineUnavailable for answers of an unexpected form.
    """
    try:
        await engine.start()
    except _MALFORMED as error:
        why = f"{type(error).__name__}: {error}"
        raise EngineUnavailable(f"{engine.url} does not describe itself as an engine server does ({why})") from None
    return engine
