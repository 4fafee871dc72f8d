"""Attempts: earlier requests of a session by request hash, the input of the retry rules.

This package never imports `proxy.turns`: an attempt knows its interactions, not the generations that produce them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from proxy.types import Interaction
from tokengrove.reasons import Status


class Stage(StrEnum):
    """running: being sampled; ending: a choice has failed or was cancelled, others may run; then complete or failed."""

    RUNNING = "running"
    ENDING = "ending"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Attempt:
    """One requested reply with its `n` choices. It fails if any choice fails.

    `interactions`: one per choice, empty until the attempt has ended. `written`: the end of the reply was sent to a
    client. `joined`: a client has read from it. `readers`: clients connected to it now. `grace`: the task that cancels
    it after the last reader leaves. `superseded`: a newer attempt replaces it. `unsettled`: another replica committed
    it and may still be sending it.
    """

    key: str
    idempotency_key: str | None = None
    stage: Stage = Stage.RUNNING
    interactions: list[Interaction] = field(default_factory=list)
    joined: bool = False
    readers: int = 0
    written: bool = False
    superseded: bool = False
    unsettled: bool = False
    grace: asyncio.Task[None] | None = None

    def failures(self) -> list[str]:
        """The ids of the choices that were recorded as failed or aborted."""
        return [i.id for i in self.interactions if i.status in (Status.FAILED, Status.ABORTED)]

    def join(self) -> None:
        """Count one more reader, and stop the grace period if it is running."""
        self.joined = True
        self.readers += 1
        if self.grace is not None:
            self.stop_grace()

    def leave(self) -> bool:
        """Remove a reader. Return True if the attempt has not ended and has no reader left."""
        self.readers -= 1
        return self.readers == 0 and self.stage in (Stage.RUNNING, Stage.ENDING)

    def stop_grace(self) -> None:
        """Cancel the grace period, if one is running."""
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    def end(self, interactions: list[Interaction]) -> None:
        """End the attempt with the interactions of all its choices."""
        self.interactions = interactions
        self.stage = Stage.COMPLETE
        for interaction in interactions:
            if interaction.status is not Status.COMPLETE:
                self.stage = Stage.FAILED
        if self.grace is not None:
            self.stop_grace()


def reply_id(interaction_id: str) -> str:
    """The id of the reply that a choice belongs to. Choice 0 has the id of the reply, choice k > 0 has `<id>.k`."""
    return interaction_id.partition(".")[0]


def recall(interactions: Iterable[Interaction], unwritten: set[str]) -> dict[str, list[Attempt]]:
    """Rebuild the ended attempts of a stored session by request hash, oldest first.

    `unwritten`: ids of interactions whose reply was never completely written.
    """
    attempts: dict[str, list[Attempt]] = {}
    by_reply = sorted(interactions, key=lambda i: reply_id(i.id))
    replies = [list(choices) for _, choices in groupby(by_reply, key=lambda i: reply_id(i.id))]
    for choices in sorted(replies, key=lambda choices: max(i.seq for i in choices)):
        if any(i.status is Status.SUPERSEDED for i in choices):
            continue
        choices.sort(key=lambda i: (len(i.id), i.id))
        attempt = Attempt(choices[0].request_hash, choices[0].idempotency_key, interactions=choices)
        attempt.stage = Stage.COMPLETE if all(i.status is Status.COMPLETE for i in choices) else Stage.FAILED
        attempt.written = not any(i.id in unwritten for i in choices)
        attempts.setdefault(attempt.key, []).append(attempt)
    return attempts
