"""Which servers have all parts of a weight transfer that is under way.

A server that returns or joins in the middle lacks the earlier parts, whatever version the last one names. Trainers that
send no BEGIN and END begin with the first part, and name the version in the last part or in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.engine.interface import WeightTransfer
from proxy.engine.servers.placement import Member
from tokengrove.errors import EngineUnavailable

_GROUP = (WeightTransfer.INIT_GROUP, WeightTransfer.DESTROY_GROUP)


class Transfer:
    """The servers that have had each part so far, if a transfer is under way.

    `torn`: the URLs of servers that may name the version of a transfer of which they have not had all parts.
    """

    def __init__(self) -> None:
        self._having: set[Member] | None = None
        self._bracketed = False
        self._named: Any = None
        self.torn: set[str] = set()

    def latecomers(self, step: WeightTransfer, named: Any, alive: Sequence[Member]) -> list[Member]:
        """The servers of those `alive` that lack parts before this `step`, which names the version `named`, or None.

        Raises EngineUnavailable if all of them do: whatever part comes next then begins a new transfer.
        """
        if step in _GROUP:
            self.end()
            return []
        if self._having is None or not self._continues(step, named):
            self._having, self._bracketed = set(alive), step is WeightTransfer.BEGIN
            self.torn -= {member.url for member in alive}
        self._named = named
        late = [member for member in alive if member not in self._having]
        if late and len(late) == len(alive):
            self.end()
            raise EngineUnavailable("no engine server has the earlier parts of this weight transfer; begin it anew")
        if step is WeightTransfer.END:
            self.end()
        return late

    def lose(self, member: Member) -> None:
        """Note that a server is gone. It may have forgotten everything, and may have had the latest part or not."""
        if self._having is not None and member in self._having:
            self._having.discard(member)
            if self._named is not None:
                self.torn.add(member.url)

    def end(self) -> None:
        """Note that no transfer is under way: the next part begins one."""
        self._having = self._named = None

    def _continues(self, step: WeightTransfer, named: Any) -> bool:
        if step is WeightTransfer.BEGIN:
            return False
        return self._bracketed or self._named is None or named == self._named
