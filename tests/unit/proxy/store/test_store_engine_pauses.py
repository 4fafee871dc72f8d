"""Notes of paused engine servers: one for each server and owner, and none that was renewed is forgotten."""

from __future__ import annotations

from proxy.store.store import Store
from proxy.types import PauseNote

NOTE = PauseNote("http://a", "one:8080", "abort", "", 100.0)


async def test_a_note_replaces_its_owners_own_and_is_forgotten_unless_it_was_renewed(store: Store) -> None:
    pauses = store.pauses
    other = NOTE._replace(owner="two:8080", released="kv_cache,weights")
    await pauses.note([NOTE, NOTE._replace(url="http://b"), other])
    renewed = NOTE._replace(until=200.0, mode="in_place")
    await pauses.note([renewed])
    assert set(await pauses.noted()) == {renewed, NOTE._replace(url="http://b"), other}
    await pauses.forget([NOTE, NOTE._replace(url="http://b")])
    assert set(await pauses.noted()) == {renewed, other}
    await pauses.forget([renewed])
    assert await pauses.noted() == [other]
