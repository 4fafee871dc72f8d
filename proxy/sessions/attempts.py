"""What was tried before in a session, by request hash: the memory that the rules of retries look at."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

from proxy.types import Interaction, Status

if TYPE_CHECKING:
    from proxy.turns.turn import Turn


class Stage(StrEnum):
    """running: being sampled. ending: given up, its failure is not recorded yet. Then complete or failed."""

    RUNNING = "running"
    ENDING = "ending"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Attempt:
    """One reply that was asked for: a choice each in `turns` while it runs, in `interactions` once it has ended.

    It failed if any choice did. `written`: its end went out to a client. `readers` wait for it now; while there are
    none, `grace` is running out. `unsettled`: another replica committed it and may be writing it out at this moment.
    """

    key: str
    idempotency_key: str | None = None
    stage: Stage = Stage.RUNNING
    turns: Sequence[Turn] = ()
    interactions: list[Interaction] = field(default_factory=list)
    readers: int = 0
    written: bool = False
    superseded: bool = False
    unsettled: bool = False
    grace: asyncio.Task[None] | None = None

    def failures(self) -> list[str]:
        """The ids of its choices that are recorded as failed or aborted."""
        return [i.id for i in self.interactions if i.status in (Status.FAILED, Status.ABORTED)]

    def end(self) -> None:
        """All choices have ended; how is in their interactions."""
        self.interactions = [turn.interaction for turn in self.turns]
        whole = all(interaction.status is Status.COMPLETE for interaction in self.interactions)
        self.stage = Stage.COMPLETE if whole else Stage.FAILED
        self.turns = ()


def reply_id(interaction_id: str) -> str:
    """The id of the reply that a choice belongs to: choice k > 0 is `<id>.k`."""
    return interaction_id.partition(".")[0]


def recall(interactions: Iterable[Interaction], unwritten: set[str]) -> dict[str, list[Attempt]]:
    """The ended attempts of a stored session by request hash, oldest first. `unwritten` are ids never written out."""
    attempts: dict[str, list[Attempt]] = {}
    by_reply = sorted(interactions, key=lambda i: reply_id(i.id))
    replies = [list(choices) for _, choices in groupby(by_reply, key=lambda i: reply_id(i.id))]
    for choices in sorted(replies, key=lambda choices: max(i.seq for i in choices)):
        if any(i.status is Status.SUPERSEDED for i in choices):
            continue
        choices.sort(key=lambda i: (len(i.id), i.id))
        attempt = Attempt(choices[0].request_hash, choices[0].notes.get("idempotency_key"), interactions=choices)
        attempt.stage = Stage.COMPLETE if all(i.status is Status.COMPLETE for i in choices) else Stage.FAILED
        attempt.written = not any(i.id in unwritten for i in choices)
        attempts.setdefault(attempt.key, []).append(attempt)
    return attempts
