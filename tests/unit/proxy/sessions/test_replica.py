"""News merge into a live session once, even if they arrive twice, late or out of order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.sessions.attempts import Stage
from proxy.sessions.live_session import LiveSession
from proxy.sessions.replica import NOTHING_SEEN, absorb, note_commit
from proxy.store.news import News, Seen
from proxy.store.store import Store
from proxy.trajectory.cache import InteractionCache
from proxy.turns.earlier import note_written
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction
from tests.wide import first
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Status


def empty() -> LiveSession:
    return LiveSession(SessionRecord("s"), InteractionCache(), seen=NOTHING_SEEN)


def state(session: LiveSession) -> Any:
    """Everything in a session that another replica may have changed."""
    attempts = {
        key: sorted((attempt.stage, sorted(i.id for i in attempt.interactions)) for attempt in same)
        for key, same in session.attempts.items()
        if same
    }
    nodes = {
        name: (node.interaction, node.parent and node.parent.interaction.id)
        for name, node in session.cache.nodes.items()
    }
    counts = (session.turns_taken, session.sampled_tokens, session.ended.is_set())
    return session.record, nodes, attempts, counts, session.seen


class Others:
    """Random changes of session `s` by other replicas."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        self._store, self._chance = store, chance
        self._complete: list[str] = []
        self._failed: list[str] = []

    async def change(self) -> None:
        await self._chance.choice((self._turn, self._turn, self._fail, self._supersede, self._reward, self._mark))()

    async def _turn(self) -> None:
        parent = self._chance.choice([None, *self._complete])
        await self._append(interaction(f"c{len(self._complete)}", parent=parent), self._complete)

    async def _fail(self) -> None:
        failed = replace(interaction(f"f{len(self._failed)}"), status=Status.FAILED)
        await self._append(failed, self._failed)

    async def _append(self, node: Interaction, names: list[str]) -> None:
        names.append(node.id)
        await self._store.turns.append(replace(node, request_hash=self._chance.choice("xyz")))

    async def _supersede(self) -> None:
        if self._failed:
            await self._store.turns.supersede(self._chance.choice(self._failed))

    async def _reward(self) -> None:
        if self._complete:
            name = self._chance.choice(self._complete)
            await self._store.changes.set_rewards("s", {name: {"reward": self._chance.random(), "rewards": {"r": 1.0}}})

    async def _mark(self) -> None:
        if self._complete:
            marks = {"trainable": self._chance.random() < 0.5, "spans": ((0, 1),)}
            await self._store.changes.set_rewards("s", {self._chance.choice(self._complete): marks})


@pytest.mark.parametrize("seed", first(range(12), 4))
async def test_news_merged_in_any_order_and_twice_give_the_state_of_the_database(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    store = Store.open(f"sqlite:///{tmp_path / 'r.db'}")
    await store.starts.create_session(SessionRecord("s"))
    others, session, underway = Others(store, chance), empty(), []
    for _ in range(60):
        await others.change()
        if chance.random() < 0.5:  # a request reads the database now, and merges the news later
            underway.append(await store.news.load_news("s", session.seen))
        while underway and chance.random() < 0.4:
            news = underway[chance.randrange(len(underway))]
            absorb(session, news, elsewhere=True)
            if chance.random() < 0.5:
                underway.remove(news)
    await store.changes.end_session(SessionRecord("s", status=SessionStatus.ENDED))
    for news in (await store.news.load_news("s", session.seen), *underway):
        absorb(session, news, elsewhere=True)
    fresh = empty()
    absorb(fresh, await store.news.load_news("s", NOTHING_SEEN), elsewhere=True)
    await store.close()
    assert state(session) == state(fresh)


async def test_calls_that_began_here_are_left_to_their_own_turns(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'r.db'}")
    await store.starts.create_session(SessionRecord("s"))
    session = empty()
    session.begun_here.add("mine")
    await store.turns.append(interaction("mine"))
    await store.turns.append(interaction("theirs"))
    absorb(session, await store.news.load_news("s", session.seen), elsewhere=True)
    await store.close()
    assert set(session.cache.nodes) == {"theirs"}
    assert session.seen == Seen(2, 0)


def test_a_commit_of_ours_is_seen_only_if_nothing_is_missing_before_it() -> None:
    session = empty()
    session.seen = Seen(3, 1)
    note_commit(session, 4)
    assert session.seen == Seen(3, 1)
    note_commit(session, 3)
    assert session.seen == Seen(4, 1)


async def test_a_reply_is_settled_once_it_was_written_or_it_is_too_late_for_that(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'r.db'}")
    await store.starts.create_session(SessionRecord("s"))
    for name, completed_at in (("early", 0.0), ("now", 4e9), ("written", 4e9)):
        await store.turns.append(replace(interaction(name), completed_at=completed_at, request_hash=name))
    session = empty()
    absorb(session, await store.news.load_news("s", session.seen), elsewhere=True)
    await store.close()
    outcomes = {}
    for name, attempts in session.attempts.items():
        assert [attempt.unsettled for attempt in attempts] == [True]
        outcomes[name] = (note_written(attempts, {"early", "now"}), attempts[0].written)
    assert outcomes == {"early": (True, False), "now": (False, False), "written": (True, True)}


@pytest.mark.parametrize("failed", [None, "r", "r.10"])
@pytest.mark.parametrize("unreplied", [None, "r", "r.10"])
def test_the_choices_of_a_reply_make_the_same_attempt_in_two_pieces_as_in_one(
    failed: str | None, unreplied: str | None
) -> None:
    choices = [interaction(f"r.{k}" if k else "r", seq=k) for k in range(11)]
    choices = [replace(choice, status=Status.FAILED) if choice.id == failed else choice for choice in choices]

    def merged(*pieces: Sequence[Interaction]) -> Any:
        session = empty()
        for piece in pieces:
            late = {choice.id for choice in piece} & {unreplied}
            absorb(session, News(Seen(piece[-1].seq + 1, 0), None, piece, late, ()), elsewhere=True)
        ((attempt,),) = session.attempts.values()
        return attempt.stage, attempt.written, attempt.unsettled, [choice.id for choice in attempt.interactions]

    wanted = Stage.FAILED if failed else Stage.COMPLETE, unreplied is None, unreplied is not None
    assert merged(choices[:4], choices[4:]) == merged(choices) == (*wanted, [choice.id for choice in choices])
