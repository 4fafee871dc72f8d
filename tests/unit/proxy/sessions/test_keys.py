"""Keys of live sessions are checked in memory; keys of sessions that left memory are looked up in the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.sessions.endings import Endings
from proxy.sessions.ids import is_session_id
from proxy.sessions.issued_keys import IssuedKeys, KeyKind
from proxy.sessions.key_rotation import KeyRotation
from proxy.sessions.keys import Grant, Keyring, hash_key, session_of_key
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.new_records import NewRecords
from proxy.sessions.registry import Registry
from proxy.sessions.session_starter import SessionStarter
from proxy.sessions.start_limits import StartLimits
from proxy.settings import Settings
from proxy.store.key_index import KeyIndex
from proxy.store.sql.reads import KeyHolder
from proxy.store.store import Store
from proxy.telemetry.metrics import Metrics
from proxy.types import SessionRecord

RECORD = SessionRecord("s", api_key_hash=hash_key("agent"), control_key_hash=hash_key("control"))
RECORD = replace(RECORD, path_key_hash=hash_key("path"))


class Index:
    """A store without sessions, which counts how often it is asked."""

    shared = False

    def __init__(self) -> None:
        self.asked = 0

    async def find_key(self, key_hash: str) -> KeyHolder:
        self.asked += 1
        return KeyHolder()

    async def load_session(self, session_id: str) -> None:
        self.asked += 1


async def opened(keyring: Keyring) -> tuple[Any, ...]:
    """The session that the agent's key, the control key and the path key open."""
    agent, control = await keyring.grant("agent"), await keyring.grant("control")
    return agent.session_id, control.session_id, await keyring.opens_path("s", "path")


async def test_keys_of_a_live_session_are_checked_without_the_store() -> None:
    index: Any = Index()
    keyring = Keyring(index, None)
    keyring.add(RECORD)
    assert await opened(keyring) == ("s", "s", True)
    assert await keyring.grant("control") == Grant(session_id="s", control=True)
    assert not await keyring.opens_path("s", "wrong")
    assert index.asked == 0


@pytest.mark.parametrize("kind", KeyKind)
async def test_releasing_a_session_clears_its_key_from_memory(kind: KeyKind) -> None:
    index: Any = Index()
    keyring = Keyring(index, None)
    keyring.add(RECORD)
    keyring.release(RECORD)
    if kind is KeyKind.PATH:
        assert not await keyring.opens_path("s", "path")
    else:
        assert await keyring.grant(kind.value) == Grant()
    assert index.asked > 0


async def test_releasing_a_session_leaves_a_chosen_key_that_moved_to_another() -> None:
    keyring = Keyring(Index(), None)  # type: ignore[arg-type]
    keyring.add(RECORD)
    keyring.add(SessionRecord("next", api_key_hash=RECORD.api_key_hash))
    keyring.release(RECORD)
    assert await keyring.grant("agent") == Grant(session_id="next")


async def test_a_key_that_is_chosen_again_while_it_is_looked_up_belongs_to_the_new_session() -> None:
    class Slow(Index):
        async def find_key(self, key_hash: str) -> KeyHolder:
            keyring.release(RECORD)
            keyring.add(SessionRecord("next", api_key_hash=RECORD.api_key_hash))
            return KeyHolder(RECORD)

    keyring = Keyring(Slow(), None)  # type: ignore[arg-type]
    assert await keyring.grant("agent") == Grant(session_id="s")  # as it was when it was asked for
    assert await keyring.grant("agent") == Grant(session_id="next")


@pytest.mark.parametrize("kind", [KeyKind.AGENT, KeyKind.PATH])
async def test_a_key_that_is_replaced_while_it_is_looked_up_opens_nothing_from_then_on(kind: KeyKind) -> None:
    new = replace(RECORD, api_key_hash=hash_key("new agent"), path_key_hash=hash_key("new path"))

    class Rotating(Index):
        """Reads the record, which another call replaces before the answer is there."""

        record = RECORD

        def rotate(self) -> None:
            keyring.release(self.record)
            self.record = new
            keyring.add(new)

        async def find_key(self, key_hash: str) -> KeyHolder:
            found = KeyHolder(self.record if key_hash == self.record.api_key_hash else None)
            self.rotate()
            return found

        async def load_session(self, session_id: str) -> SessionRecord:  # type: ignore[override]
            found = self.record
            self.rotate()
            return found

    index: Any = Rotating()
    keyring = Keyring(index, None)
    if kind is KeyKind.AGENT:
        assert await keyring.grant("agent") == Grant(session_id="s")  # as it was when it was asked for
    else:
        assert await keyring.opens_path("s", "path")
    assert await keyring.grant("agent") == Grant() and not await keyring.opens_path("s", "path")
    assert await keyring.grant("new agent") == Grant(session_id="s")
    assert await keyring.opens_path("s", "new path")


async def test_an_unknown_key_is_looked_up_once_until_a_session_brings_it() -> None:
    index: Any = Index()
    keyring = Keyring(index, None)
    await keyring.grant("agent")
    asked = index.asked
    assert await keyring.grant("agent") == Grant() and index.asked == asked
    keyring.add(RECORD)
    assert await keyring.grant("agent") == Grant(session_id="s")


def test_the_session_of_an_unknown_key_has_the_same_name_for_ever() -> None:
    assert session_of_key("EMPTY") == "key-3cd748da7f322af1"
    names = {session_of_key(key) for key in ("EMPTY", "empty", "EMPTY ", "\udce9", "x" * 5000)}
    assert len(names) == 5 and all(is_session_id(name) and len(name) == 20 for name in names)
    assert session_of_key("EMPTY")[4:] not in hash_key("EMPTY")  # which the store would have of an issued key


class CountingIndex:
    """The store's index, with a count of the lookups."""

    def __init__(self, index: KeyIndex) -> None:
        self._index, self.shared, self.asked = index, index.shared, 0

    async def find_key(self, key_hash: str) -> KeyHolder:
        self.asked += 1
        return await self._index.find_key(key_hash)

    async def load_session(self, session_id: str) -> SessionRecord | None:
        self.asked += 1
        return await self._index.load_session(session_id)


class House:
    """A started session `s` with everything that releases its keys."""

    def __init__(self, store: Store) -> None:
        self.index = CountingIndex(store.keys)
        self.keyring = Keyring(self.index, None)  # type: ignore[arg-type]
        settings = Settings()
        limits, records = StartLimits(settings, lambda: 0), NewRecords(settings, lambda: 0)
        self.registry = Registry(store.news, self.keyring, Metrics())
        self.named = NamedSessions(self.registry, store.starts, limits, records)
        self.endings = Endings(self.registry, self.named, store.changes, self.keyring)
        self.starter = SessionStarter(
            self.registry, store.starts, limits, records, self.keyring, self.endings, settings
        )
        self.rotation = KeyRotation(self.registry, store.changes, self.keyring, None)

    async def lookups(self, keys: IssuedKeys) -> list[bool]:
        """For the agent's, the control and the path key: True if the store had to be asked."""
        asked = []
        for check in (
            self.keyring.grant(keys.api_key),
            self.keyring.grant(keys.control_key),
            self.keyring.opens_path("s", keys.path_key or ""),
        ):
            before = self.index.asked
            await check
            asked.append(self.index.asked > before)
        return asked


@pytest.mark.parametrize("way", ["end", "forget", "rotate"])
async def test_keys_leave_memory_when_a_session_ends_is_forgotten_or_gets_new_ones(tmp_path: Path, way: str) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'k.db'}")
    house = House(store)
    keys = await house.starter.start({"session_id": "s"})
    assert await house.lookups(keys) == [False, False, False]
    session = await house.registry.get("s")
    if way == "end":
        await house.endings.end(session)
        assert await house.lookups(keys) == [True, True, True]
    elif way == "forget":
        house.registry.forget(session)
        assert house.registry.sessions() == []
        assert await house.lookups(keys) == [True, True, True]
    else:
        new = await house.rotation.rotate(session, [*KeyKind], None)
        assert await house.lookups(new) == [False, False, False]
        replaced = Grant(withdrawn=True)
        assert await house.keyring.grant(keys.api_key) == await house.keyring.grant(keys.control_key) == replaced
        assert not await house.keyring.opens_path("s", keys.path_key or "")
    await store.close()


async def test_a_chosen_key_that_was_tried_before_its_session_started_is_still_known_after_the_end(
    tmp_path: Path,
) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'k.db'}")
    house = House(store)
    assert await house.keyring.grant("chosen") == Grant()
    await house.starter.start({"session_id": "s", "api_key": "chosen"})
    await house.endings.end(await house.registry.get("s"))
    assert await house.keyring.grant("chosen") == Grant(session_id="s")
    await store.close()
