"""The protocol of an engine server in a pool: an engine at a URL, which is probed and may be lost."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from proxy.engine.callbacks import CallbackEngine
from proxy.engine.interface import Engine, PauseMode
from tokengrove.errors import EngineUnavailable

_MALFORMED = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""The exceptions of reading an answer of an unexpected form."""


@runtime_checkable
class RemoteEngine(Engine, CallbackEngine, Protocol):
    """An engine at `url`. Every call may raise EngineLost.

    `blind`: the reason why it takes no images of a vision model, else "". `missing`: what the server lacks because of
    flags that it was started without, and what that costs; a sentence each. `compared`: it was found to serve the model
    of the proxy; False if it cannot be compared.
    """

    url: str
    blind: str
    compared: bool

    @property
    def missing(self) -> list[str]: ...

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

    def cut(self) -> None:
        """Abandon all replies in flight without notifying the server: each raises EngineLost."""


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
