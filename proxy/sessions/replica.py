"""Merges the commits of other replicas into a live session, so that memory equals the database.

A merge may happen twice or out of order, because two requests of a session may read the database at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.sessions.attempts import Attempt, Stage, recall, reply_id
from proxy.sessions.live_session import LiveSession
from proxy.store.news import MutableFields, News, Seen
from proxy.types import Interaction
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Status

# Below every state of a stored session.
NOTHING_SEEN = Seen(0, -1)


def absorb(session: LiveSession, news: News, *, elsewhere: bool) -> None:
    """Merge news into the session. Turns that this replica commits are skipped: they are merged after their commit.

    `elsewhere`: True if other replicas may still be sending the replies of the new interactions.
    """
    if news.seen.revision >= session.seen.revision:
        if news.record is not None:
            session.record = news.record
        _set_changed(session, [*news.changed, *map(_fields_of, news.interactions)])
    new = [i for i in news.interactions if i.seq >= session.seen.next_seq]
    foreign = [i for i in new if i.id not in session.begun_here]
    for interaction in foreign:
        if interaction.status is Status.COMPLETE and interaction.id not in session.cache.nodes:
            session.cache.add(session.cache.place_stored(interaction))
            session.record_foreign(interaction)
    _merge(session.attempts, recall(foreign, set(news.unreplied)), elsewhere)
    session.seen = Seen(max(session.seen.next_seq, news.seen.next_seq), max(session.seen.revision, news.seen.revision))
    if session.record.status is not SessionStatus.ACTIVE:
        session.ended.set()


def note_commit(session: LiveSession, seq: int) -> None:
    """Record that a turn of this replica was committed as `seq`. `seen` advances only if no unseen turn precedes it."""
    if seq == session.seen.next_seq:
        session.seen = Seen(seq + 1, session.seen.revision)


def note_doubt(session: LiveSession, interaction_id: str) -> None:
    """Record that a commit failed but may have reached the database; the next refresh reads everything again."""
    session.begun_here.discard(interaction_id)
    session.seen = NOTHING_SEEN


def merge_stored(session: LiveSession, attempt: Attempt) -> None:
    """Merge the stored reply of an attempt that failed on this replica because its commit was in doubt."""
    same, name = session.attempts.get(attempt.key, []), reply_id(attempt.interactions[0].id)
    for stored in [a for a in same if a.interactions and reply_id(a.interactions[0].id) == name]:
        if stored is not attempt:
            _complete(attempt, stored)
            same.remove(stored)


def _fields_of(interaction: Interaction) -> MutableFields:
    i = interaction
    return MutableFields(i.id, i.status, i.reward, dict(i.rewards), i.token_rewards, i.trainable, i.spans)


def _set_changed(session: LiveSession, changed: Sequence[MutableFields]) -> None:
    superseded = set()
    for fields in changed:
        node = session.cache.nodes.get(fields.interaction_id)
        if node is not None:
            _set_fields(node.interaction, fields)
        elif fields.status is Status.SUPERSEDED:
            superseded.add(fields.interaction_id)
    if superseded:
        _forget(session.attempts, superseded)


def _set_fields(interaction: Interaction, fields: MutableFields) -> None:
    interaction.reward, interaction.rewards = fields.reward, fields.rewards
    interaction.token_rewards = fields.token_rewards
    interaction.trainable, interaction.spans = fields.trainable, fields.spans


def _forget(attempts: Mapping[str, list[Attempt]], superseded: set[str]) -> None:
    """Remove failed attempts that another replica superseded."""
    for same in attempts.values():
        same[:] = [a for a in same if not any(interaction.id in superseded for interaction in a.interactions)]


def _merge(attempts: dict[str, list[Attempt]], recalled: Mapping[str, list[Attempt]], elsewhere: bool) -> None:
    """Add recalled attempts. The choices of one reply may arrive in several pieces."""
    for key, new in recalled.items():
        known = attempts.setdefault(key, [])
        for attempt in new:
            attempt.unsettled = elsewhere and not attempt.written
            name = reply_id(attempt.interactions[0].id)
            part = next((a for a in known if a.interactions and reply_id(a.interactions[0].id) == name), None)
            if part is None:
                known.append(attempt)
            else:
                _complete(part, attempt)


def _complete(part: Attempt, more: Attempt) -> None:
    """Add more choices of a reply. They may include a choice whose commit seemed to fail on this replica."""
    by_id = {interaction.id: interaction for interaction in (*part.interactions, *more.interactions)}
    part.interactions = sorted(by_id.values(), key=lambda i: (len(i.id), i.id))
    complete = all(interaction.status is Status.COMPLETE for interaction in part.interactions)
    part.stage = Stage.COMPLETE if complete else Stage.FAILED
    part.written = part.written and more.written
    part.unsettled = part.unsettled or more.unsettled
