"""The servers that have all parts of the weight transfer in progress.

A server that returns or joins in the middle lacks the earlier parts, whichever version the last part names. Trainers
that send no BEGIN and END start with the first part, and name the version in the last part or in all parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.engine.interface import WeightTransfer
from proxy.engine.servers.placement import Member
from tokengrove.errors import EngineUnavailable, InvalidRequest

_GROUP = frozenset(
    {
        *(WeightTransfer.INIT_GROUP, WeightTransfer.DESTROY_GROUP),
        *(WeightTransfer.INIT_ENGINE, WeightTransfer.SHUTDOWN_ENGINE),
    }
)
_FIRST = (WeightTransfer.BEGIN, WeightTransfer.START)
_LAST = (WeightTransfer.END, WeightTransfer.FINISH)


class Transfer:
    """The servers that have received all parts of the transfer in progress, if any.

    `torn`: the URLs of servers that may report the version of a transfer although they lack parts of it.
    """

    def __init__(self) -> None:
        self._having: set[Member] | None = None
        self._bracketed = False
        self._named: Any = None
        self.torn: set[str] = set()

    def latecomers(self, step: WeightTransfer, named: Any, alive: Sequence[Member]) -> list[Member]:
        """The servers in `alive` that lack parts before this `step`. `named`: the version that the step names, or None.

        Raises EngineUnavailable if all of them lack parts. The next part then begins a new transfer.
        """
        if step in _GROUP:
            self.end()
            return []
        if self._having is None or not self._continues(step, named):
            self._having, self._bracketed = set(alive), step in _FIRST
            self.torn -= {member.url for member in alive}
        self._named = named
        late = [member for member in alive if member not in self._having]
        if late and len(late) == len(alive):
            self.end()
            raise EngineUnavailable("no engine server has the earlier parts of this weight transfer; begin it anew")
        if step in _LAST:
            self.end()
        return late

    def lose(self, member: Member) -> None:
        """Note that a server is lost. It may have lost all parts, and may or may not have received the latest part."""
        if self._having is not None and member in self._having:
            self._having.discard(member)
            if self._named is not None:
                self.torn.add(member.url)

    def end(self) -> None:
        """Note that no transfer is in progress: the next part begins one."""
        self._having = self._named = None

    def _continues(self, step: WeightTransfer, named: Any) -> bool:
        if step in _FIRST:
            return False
        return self._bracketed or self._named is None or named == self._named


def rank_offset(fields: Mapping[str, Any]) -> int | None:
    """The rank of the first server in a step that forms a group; None in other steps. Raises InvalidRequest."""
    info = fields.get("init_info")  # vLLM's
    offset = info.get("rank_offset") if isinstance(info, Mapping) else fields.get("rank_offset")
    if offset is not None and type(offset) is not int:
        raise InvalidRequest("'rank_offset' must be an integer: the rank of the first server", param="rank_offset")
    return offset


def with_rank_offset(fields: Mapping[str, Any], offset: int) -> Mapping[str, Any]:
    """The fields of the step for a server whose first rank is `offset`."""
    if isinstance(info := fields.get("init_info"), Mapping):
        return {**fields, "init_info": {**info, "rank_offset": offset}}
    return {**fields, "rank_offset": offset}
