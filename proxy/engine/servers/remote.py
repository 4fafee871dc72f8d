"""The protocol of an engine server in a pool: an engine behind a URL that is probed and may be lost."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from proxy.engine.callbacks import CallbackEngine
from proxy.engine.interface import Engine, PauseMode


@runtime_checkable
class RemoteEngine(Engine, CallbackEngine, Protocol):
    """An engine behind `url`. Every call may raise EngineLost.

    `blind`: why it takes no images although the model sees; "" otherwise.
    """

    url: str
    blind: str

    @property
    def world_size(self) -> int:
        """The number of processes that hold weights: the ranks that the server takes in a weight transfer group."""

    async def check(self) -> int:
        """Return the weight version that the server serves. Raises EngineLost if it does not answer."""

    async def update_weights(self, path: str, version: int | None = None, *, busy: bool = False) -> int:
        """As for every engine. `busy`: other processes have requests on the server, too."""

    async def follow(self, mode: PauseMode | None, version: int | None) -> None:
        """Note that another process has paused the server by `mode` (None: it runs), and set its weight `version`.

        Raises EngineIncapable if it cannot keep the requests of this process through that pause.
        """

    async def rests(self) -> bool:
        """True if the server says that it is paused; one that cannot tell is taken to run. Raises EngineLost."""

    def cut(self) -> None:
        """Abandon all replies in flight without asking the server: each raises EngineLost."""
