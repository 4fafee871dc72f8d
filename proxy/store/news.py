"""Values of optimistic locking: the state in which a replica has seen a session, and later changes in the database.

Every interaction raises the session's `next_seq`, and every other change its `revision`, in the same transaction. A
replica that knows both numbers has seen every change up to them.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from proxy.types import Interaction, SessionRecord
from tokengrove.reasons import Status


class Seen(NamedTuple):
    """The seen state of a session: all interactions below `next_seq`, and all other changes up to `revision`."""

    next_seq: int = 0
    revision: int = 0


class InArchive(NamedTuple):
    """The place of a session that was moved to an archive: the URL of its file."""

    file: str


def first_seen(created_at: float) -> Seen:
    """The state that a session begins in, by its time of creation in Unix seconds.

    A deleted session and a later session with the same id therefore begin with different revisions. A replica that
    still has the deleted session in memory never confuses the two, whatever changed in either.
    """
    return Seen(0, first_revision(created_at))


def first_revision(created_at: float) -> int:
    """The revision of that state."""
    return int(created_at * 1e6) % 2**30


@dataclass(frozen=True, slots=True)
class MutableFields:
    """The fields of a stored interaction that may change after its commit."""

    interaction_id: str
    status: Status
    reward: float | None
    rewards: dict[str, float]
    token_rewards: array[float] | None
    trainable: bool
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class News:
    """The state of a session in the database (`seen`) and everything that the reader had not seen.

    `record`: None unless the revision grew.
    `interactions`: the ones from the reader's `next_seq` on, of any status, by seq.
    `unreplied`: ids among `interactions` whose reply was never completely written.
    `changed`: the mutable fields of all older interactions; empty unless the revision grew.
    """

    seen: Seen
    record: SessionRecord | None
    interactions: Sequence[Interaction]
    unreplied: Collection[str]
    changed: Sequence[MutableFields]
