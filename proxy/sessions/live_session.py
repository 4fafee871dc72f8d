"""A live session: its record, its tree, and its running turns. It belongs to one event loop of one replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

from proxy.parsed_items import ParsedBodies
from proxy.sessions.attempts import Attempt
from proxy.store.news import Seen
from proxy.telemetry.log_lines import Value
from proxy.telemetry.session_labels import labels_of
from proxy.trajectory.cache import InteractionCache
from proxy.types import ImageFile, ImagePart, Interaction, SessionRecord
from tokengrove.errors import SessionClosed, SessionNotFound, brief
from tokengrove.options.model import RouteKind
from tokengrove.options.session import SessionStatus
from tokengrove.options.start import EpisodeOptions

Changes = Mapping[str, Mapping[str, Any]]
"""By interaction id: the new values of the fields that change (reward, rewards, token_rewards, trainable, spans)."""

_seq_of = attrgetter("seq")

# Estimated bytes in memory: of a session, of a turn without its tokens, and of a token with its part of the text. With
# sessions of 6 turns and 4,800 tokens the sum is a tenth above the growth of the process (`tests.bench.open_sessions`).
_SESSION_BYTES, _TURN_BYTES, _TOKEN_BYTES = 4000, 4000, 20


@dataclass(eq=False)
class LiveSession:
    """A session in memory. Its event and locks are created on first use, because most sessions never need them.

    `sampled_tokens`: output tokens of its complete turns.
    `turns_taken`: the number of complete and running turns.
    `running`: the number of turns that run on this replica.
    `waiting`: the number of requests that wait for its end, or for a paused engine.
    `stored`: its row is queued or in the store. A session that was only named has no row before its first turn.
    `confirmed`: its row was seen in the store.
    `seen`: the state of the store that memory includes, except for turns `begun_here`, which this replica commits.
    `attempts`: earlier and running requests by request hash, oldest first.
    `parsed`: the parsed items of its latest request bodies.
    `size`: its estimated bytes in memory.
    `used_at`: when it was last used, by the monotonic clock.
    `ending`: its end is being committed; it takes no more turns, unless that fails.
    `deleted`: it was deleted, here or by another replica, and is no longer in the store.
    `images`: its stored images by digest, as parts without a position; `image_sizes`: bytes of each.
    `image_urls`: digests of its fetched images by URL; an image is not stored if its turn was not committed.
    `turned_at`: when its last turn was committed, in Unix seconds.
    `follows`: the id of the previous session of its series (see `session_series`), which has ended.
    """

    record: SessionRecord
    cache: InteractionCache
    sampled_tokens: int = 0
    turns_taken: int = 0
    running: int = 0
    waiting: int = 0
    stored: bool = True
    confirmed: bool = True
    seen: Seen = Seen()
    begun_here: set[str] = field(default_factory=set)
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    used_at: float = field(default_factory=time.monotonic)
    parsed: ParsedBodies = field(default_factory=dict)
    size: int = _SESSION_BYTES
    ending: bool = False
    deleted: bool = False
    images: dict[str, ImagePart] = field(default_factory=dict)
    image_sizes: dict[str, int] = field(default_factory=dict)
    image_urls: dict[str, str] = field(default_factory=dict)
    follows: str | None = None
    turned_at: float = 0.0
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.record.session_id

    @cached_property
    def ended(self) -> asyncio.Event:
        """Set when the session has ended."""
        return asyncio.Event()

    @cached_property
    def lock(self) -> asyncio.Lock:
        """Held while rewards, marks, keys or the end change."""
        return asyncio.Lock()

    @cached_property
    def committing(self) -> asyncio.Lock:
        """Held while a turn is committed, if replicas share the store."""
        return asyncio.Lock()

    @cached_property
    def tried(self) -> set[str]:
        """With `follows`: hashes of requests first sent to this session, so they retry no request of `follows`."""
        return set()

    @cached_property
    def episodes(self) -> EpisodeOptions | None:
        """The rules by which it is cut out of endless traffic; None: it is not."""
        given = self.record.turn_options.get("episodes")
        return None if given is None else EpisodeOptions(**{**given, "lineage": frozenset(given.get("lineage") or ())})

    @property
    def name(self) -> str:
        """What its address and its keys name: the first session of its series, itself without one."""
        return self.record.series or self.id

    @property
    def closed(self) -> bool:
        """True if it takes no more turns. Turns that run are still committed."""
        return self.ending or self.record.status is not SessionStatus.ACTIVE

    @property
    def labels(self) -> dict[str, Value]:
        """Its fields in log lines besides the id: the training run, from its metadata."""
        return labels_of(self.record.metadata)

    def check_open(self) -> None:
        """Raise SessionNotFound if the session was deleted, SessionClosed if it takes no more turns."""
        if self.deleted:
            raise deleted(self.id)
        if self.ending or self.record.status is not SessionStatus.ACTIVE:
            expired, withdrawn = self.record.status is SessionStatus.EXPIRED, self.record.withdrawn
            how = "been withdrawn" if withdrawn else "expired" if expired else "ended"
            raise SessionClosed(f"session {brief(self.id)} has {how}; start a new one")

    def seconds_left(self) -> float | None:
        """Seconds until `limits.deadline_s`, negative after it; None without a deadline."""
        deadline_s = self.record.limits.get("deadline_s")
        return None if deadline_s is None else float(deadline_s) - (time.time() - self.record.created_at)

    def begin_turn(self, interaction_id: str) -> None:
        """Count a turn that starts on this replica."""
        self.running += 1
        self.turns_taken += 1
        self.begun_here.add(interaction_id)

    def end_turn(self, *, complete: bool) -> None:
        """Stop counting a turn of this replica as running. Only a complete turn stays in `turns_taken`."""
        self.running -= 1
        if not complete:
            self.turns_taken -= 1
        self.used_at = time.monotonic()

    def record_commit(self, interaction: Interaction) -> None:
        """Count the tokens of a turn that was committed on this replica."""
        external = interaction.route_kind is RouteKind.EXTERNAL
        sampled = interaction.sampled_tokens if external else len(interaction.output_ids)
        self.sampled_tokens += sampled
        self.turned_at = interaction.completed_at or self.turned_at
        self.size += _TURN_BYTES + _TOKEN_BYTES * (len(interaction.prompt_suffix) + sampled)
        if interaction.images:
            self.images.update({i.digest: ImagePart(i.digest, 0, i.width, i.height) for i in interaction.images})

    def record_images(self, files: Iterable[ImageFile]) -> list[ImageFile]:
        """Note that these images are stored for the session. Return the new ones."""
        new = [file for file in files if file.digest not in self.images]
        for file in new:
            self.images[file.digest] = ImagePart(file.digest, 0, file.width, file.height)
            self.image_sizes[file.digest] = len(file.data)
        return new

    def record_failure(self, interaction_id: str) -> None:
        """Note that this replica recorded the failure of a turn, even if its commit was in doubt before."""
        self.begun_here.add(interaction_id)

    def record_foreign(self, interaction: Interaction) -> None:
        """Count a complete turn that was committed elsewhere: on another replica, or before this process started."""
        self.turns_taken += 1
        self.record_commit(interaction)

    def touch(self) -> None:
        """Mark the session as used now, so that it is neither dropped from memory nor expired as idle."""
        self.used_at = time.monotonic()

    def complete(self) -> list[Interaction]:
        """The committed complete interactions by `seq`."""
        found = [i for node in self.cache.nodes.values() if (i := node.interaction).seq >= 0]
        found.sort(key=_seq_of)
        return found

    def reward(self, changes: Changes) -> None:
        """Apply stored changes to the interactions in memory."""
        for interaction_id, change in changes.items():
            for name, value in change.items():
                setattr(self.cache.nodes[interaction_id].interaction, name, value)


def deleted(session_id: str) -> SessionNotFound:
    """The error for an operation on a session that is deleted meanwhile."""
    return SessionNotFound(f"session {brief(session_id)} was deleted meanwhile; start a new one")
