"""Engine servers that a server left paused when it crashed are continued by its successor, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection

import pytest

from proxy.engine import pauses
from proxy.engine.interface import PauseMode
from proxy.engine.pauses import LEASE_S, Pauses
from proxy.engine.servers import proof
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.remote import RemoteEngine
from proxy.types import PauseNote
from tests.engines.gates import AdminGate
from tests.engines.pools import PROMPT, SELDOM_S, Notes, of_session, opener_of, wires
from tests.engines.scripts import following
from tests.engines.wire import LiveWire
from tests.support import until
from tokengrove.errors import InvalidRequest


@contextlib.asynccontextmanager
async def server(
    table: Notes, *live: LiveWire, owner: str = "one:8080", now: float = 0.0, crashes: bool = False
) -> AsyncIterator[tuple[Pool, AdminGate]]:
    """A server before these engine servers; `crashes`: it ends without continuing what it has paused."""
    pool = Pool([wire.url for wire in live], opener_of(), start_timeout_s=5.0, check_s=SELDOM_S)
    pool.pauses = Pauses(table, owner, clock=lambda: now)
    try:
        await pool.start()
        yield pool, AdminGate(pool)
    finally:
        if crashes:
            for member in pool._members:
                member.paused = False
            pool.pauses = Pauses()
        await pool.close()


def paused(wire: LiveWire) -> bool:
    return not wire.wire.engine._resumed.is_set()


async def test_servers_that_a_crash_left_paused_are_continued_at_the_next_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = Notes()
    async with wires(2) as live:
        async with server(table, *live, crashes=True) as (_, gate):
            await gate.admin.pause(PauseMode.ABORT)
            assert {note.url for note in table.notes.values()} == {wire.url for wire in live}
        assert all(map(paused, live))
        with caplog.at_level(logging.WARNING):
            async with server(table, *live) as (_, gate):
                assert not any(map(paused, live)) and not table.notes
                assert (await gate.read(of_session("s"))).ids == following(PROMPT, 40)
        assert caplog.text.count("is continued: one:8080 paused it and ended without that") == 2


async def test_a_note_is_written_before_the_pause_and_forgotten_after_it() -> None:
    table, seen = Notes(), list[tuple[bool, int]]()
    async with wires(1) as (wire,), server(table, wire) as (_, gate):
        write, forget = table.note, table.forget

        async def note(notes: Collection[PauseNote]) -> None:
            await write(notes)
            seen.append((paused(wire), len(table.notes)))

        async def forgotten(notes: Collection[PauseNote]) -> None:
            seen.append((paused(wire), len(table.notes)))
            await forget(notes)

        table.note, table.forget = note, forgotten  # type: ignore[method-assign]
        for _ in range(2):
            await gate.admin.update_weights("/weights/1", None, PauseMode.ABORT)
        assert seen == [(False, 1)] * 4 and not table.notes


async def test_a_server_that_is_stopped_in_a_pause_continues_it_and_leaves_no_note() -> None:
    table = Notes()
    async with wires(1) as (wire,):
        async with server(table, wire) as (_, gate):
            await gate.admin.pause(PauseMode.IN_PLACE)
        assert not paused(wire) and not table.notes


async def test_what_somebody_else_has_paused_stays_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_PROOF_S", 0.05)
    table = Notes()
    async with wires(2) as live:
        await live[0].wire.engine.pause(PauseMode.IN_PLACE)  # a trainer, at the engine server itself
        async with server(table, *live) as (pool, _):
            assert [paused(wire) for wire in live] == [True, False]
            assert [shown["state"] for shown in pool.servers()] == ["alive", "missing"]


async def test_another_server_on_the_database_continues_a_pause_once_its_lease_has_expired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pauses, "_RENEW_S", 0.0)
    table = Notes(shared=True)
    async with wires(1) as (wire,), server(table, wire, owner="two:8080", now=LEASE_S) as (other, _):
        async with server(table, wire, crashes=True) as (_, gate):
            await gate.admin.pause(PauseMode.IN_PLACE)
        await other.pauses.look()
        assert paused(wire) and not other.pauses.left  # until the lease expires, its owner may live
        monkeypatch.setattr(pauses, "_DOUBT_S", 0.0)
        (note,) = table.notes.values()
        table.notes[note.url, note.owner] = note._replace(until=LEASE_S - 1)
        await until(lambda: not paused(wire))
        await until(lambda: not table.notes)


async def test_a_server_that_lives_renews_its_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "_RENEW_S", 0.0)
    table, now = Notes(shared=True), [0.0]
    mine = Pauses(table, "one", clock=lambda: now[0])
    await mine.begin(["http://a"], PauseMode.ABORT)
    now[0] = 100.0
    renewing = asyncio.create_task(mine.run(lambda: asyncio.sleep(0)))
    await until(lambda: [note.until for note in table.notes.values()] == [100.0 + LEASE_S])
    renewing.cancel()
    other = Pauses(table, "two", clock=lambda: now[0])
    await other.look()
    assert not other.left


async def test_a_pause_whose_memory_was_released_goes_on_until_the_memory_is_back() -> None:
    """Without its memory an engine server would crash, and only the trainer knows when it can be taken back."""
    table = Notes()
    async with wires(1) as (wire,):
        async with server(table, wire, crashes=True) as (_, gate):
            await gate.admin.release_memory(("weights",), PauseMode.ABORT)
        before = len(wire.wire.calls), len(wire.wire.asked)
        async with server(table, wire) as (pool, gate):
            assert paused(wire) and (len(wire.wire.calls), len(wire.wire.asked)) == before
            assert pool.left_over == (PauseMode.ABORT, frozenset({"weights"}))
            await gate.admin.go_on(*pool.left_over)
            assert gate.state.paused is PauseMode.ABORT and gate.state.released == {"weights"} and len(table.notes) == 1
            await gate.admin.resume_memory(())
            assert not paused(wire) and not table.notes
            assert (await gate.read(of_session("s"))).ids == following(PROMPT, 40)


async def test_a_pause_does_not_fail_if_the_database_takes_no_note(caplog: pytest.LogCaptureFixture) -> None:
    table = Notes()
    async with wires(1) as (wire,), server(table, wire) as (_, gate):
        table.down = True
        await gate.admin.pause(PauseMode.ABORT)
        assert paused(wire)
        await gate.admin.resume()
        assert not paused(wire)
    assert "cannot be noted in the database: the database is down" in caplog.text


async def test_a_server_that_returns_as_the_next_pause_begins_is_paused() -> None:
    """A server was lost in a pause, so its note is forgotten when it is back; the database takes its time for that."""
    table, forgetting, forgotten = Notes(), asyncio.Event(), asyncio.Event()
    async with wires(2) as live, server(table, *live) as (pool, gate):
        lost = next(member for member in pool._members if member.url == live[1].url)
        await gate.admin.pause(PauseMode.ABORT)
        await live[1].kill()
        await pool._look_at(lost)
        await gate.admin.resume()
        await live[1].start()
        forget = table.forget

        async def slowly(notes: Collection[PauseNote]) -> None:
            forgetting.set()
            await forgotten.wait()
            await forget(notes)

        table.forget = slowly  # type: ignore[method-assign]
        returning = pool._look_at(lost)
        await forgetting.wait()
        await gate.admin.pause(PauseMode.ABORT)
        assert all(map(paused, live))
        forgotten.set()
        await returning
        assert all(map(paused, live))


async def test_a_lease_that_expired_in_an_outage_of_the_database_may_be_renewed_after_it() -> None:
    table, now = Notes(shared=True), [0.0]
    mine, other = (Pauses(table, name, clock=lambda: now[0]) for name in ("one", "two"))
    await mine.begin(["http://a"], PauseMode.ABORT)
    now[0] = LEASE_S + 10.0
    await other.look(16.0)
    assert not other.left  # its owner was as cut off from the database as everybody
    (note,) = table.notes.values()
    await table.note([note._replace(until=now[0] + 1.0)])
    now[0] += 20.0
    await other.look(16.0)
    assert not other.left
    now[0] += 20.0
    await other.look(16.0)
    assert list(other.left) == ["http://a"]


async def test_a_running_server_does_not_continue_one_without_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    """It would run what it holds, and crash."""
    table = Notes(shared=True)
    async with wires(1) as (wire,), server(table, wire, now=LEASE_S) as (pool, _):
        await wire.wire.engine.pause(PauseMode.ABORT)
        await table.note([PauseNote(wire.url, "two:8080", "abort", "weights", 0.0)])
        await pool.pauses.look()
        for _ in range(2):
            await pool._continue_left()
        assert paused(wire) and table.notes
    assert caplog.text.count("stays paused: two:8080 released its memory (weights) and ended") == 1


async def test_a_pause_begins_only_once_the_pause_of_another_server_has_been_ended() -> None:
    table, calls, begun, answered = Notes(shared=True), list[str](), asyncio.Event(), asyncio.Event()
    async with wires(1) as (wire,), server(table, wire, now=LEASE_S) as (pool, gate):
        engine = pool._members[0].engine
        resume, pause = engine.resume, engine.pause

        async def resumed() -> None:
            begun.set()
            await answered.wait()
            await resume()
            calls.append("continued")

        async def halted(mode: PauseMode) -> None:
            calls.append("paused")
            await pause(mode)

        engine.resume, engine.pause = resumed, halted  # type: ignore[method-assign]
        await table.note([PauseNote(wire.url, "two:8080", "in_place", "", 0.0)])
        await pool.pauses.look()
        continuing = asyncio.create_task(pool._continue_left())
        await begun.wait()
        pausing = asyncio.create_task(gate.admin.pause(PauseMode.IN_PLACE))
        for _ in range(50):
            await asyncio.sleep(0)
        answered.set()
        await continuing
        await pausing
        assert calls == ["continued", "paused"] and paused(wire)


async def test_a_server_that_is_removed_while_it_is_ejected_and_paused_is_continued() -> None:
    table = Notes()
    async with wires(2) as live, server(table, *live) as (pool, gate):
        await gate.admin.pause(PauseMode.IN_PLACE)
        pool._eject(pool._members[1], "it does not answer")
        await pool.remove(live[1].url)
        assert paused(live[0]) and not paused(live[1])
        assert {note.url for note in table.notes.values()} == {live[0].url}
        await gate.admin.resume()
        assert not table.notes


async def test_a_server_that_could_not_be_continued_when_it_was_removed_is_when_it_joins_anew() -> None:
    table = Notes()
    async with wires(2) as live, server(table, *live) as (pool, gate):
        await gate.admin.pause(PauseMode.IN_PLACE)
        pool._eject(pool._members[1], "it does not answer")
        live[1].forget("/continue_generation")
        await pool.remove(live[1].url)
        await gate.admin.resume()
        live[1].remember()
        assert paused(live[1]) and {note.url for note in table.notes.values()} == {live[1].url}
        await pool.add(live[1].url)
        assert not paused(live[1]) and not table.notes


async def test_the_end_of_a_pause_forgets_no_server_that_is_just_removed_and_does_not_answer() -> None:
    table = Notes()
    async with wires(2) as live, server(table, *live) as (pool, gate):
        await gate.admin.pause(PauseMode.IN_PLACE)
        pool._eject(pool._members[1], "it does not answer")
        live[1].forget("/continue_generation")
        engine, arrives, asked = pool._members[0].engine, asyncio.Event(), asyncio.Event()
        resume = engine.resume

        async def late() -> None:
            asked.set()
            await arrives.wait()
            await resume()

        engine.resume = late  # type: ignore[method-assign]
        resuming = asyncio.create_task(gate.admin.resume())
        await asked.wait()
        await pool.remove(live[1].url)
        arrives.set()
        await resuming
        await until(lambda: not pool._partings)
        live[1].remember()
        assert paused(live[1]) and {note.url for note in table.notes.values()} == {live[1].url}
        await pool.add(live[1].url)
        assert not paused(live[1]) and not table.notes


async def test_a_server_that_is_removed_as_it_is_paused_is_continued() -> None:
    table = Notes()
    async with wires(2) as live, server(table, *live) as (pool, gate):
        engine, arrives = pool._members[1].engine, asyncio.Event()
        pause, asked = engine.pause, asyncio.Event()

        async def late(mode: PauseMode) -> None:
            asked.set()
            await arrives.wait()
            await pause(mode)

        engine.pause = late  # type: ignore[method-assign]
        pausing = asyncio.create_task(gate.admin.pause(PauseMode.IN_PLACE))
        await asked.wait()
        await pool.remove(live[1].url)
        arrives.set()
        await pausing
        await until(lambda: not pool._partings)
        assert paused(live[0]) and not paused(live[1])
        assert {note.url for note in table.notes.values()} == {live[0].url}


async def test_a_server_that_is_removed_while_it_joins_a_paused_pool_is_continued() -> None:
    table = Notes()
    async with wires(2) as live, server(table, live[0]) as (pool, gate):
        await gate.admin.pause(PauseMode.IN_PLACE)
        prove, joining = pool._prove, asyncio.Event()

        async def proved(engine: RemoteEngine) -> bool:
            joining.set()
            await until(lambda: live[1].url not in pool._missing)
            return await prove(engine)

        pool._prove = proved  # type: ignore[method-assign]
        adding = asyncio.create_task(pool.add(live[1].url))
        await joining.wait()
        await pool.remove(live[1].url)
        await asyncio.wait([adding])
        await until(lambda: not pool._looks)
        assert paused(live[0]) and not paused(live[1])
        assert {note.url for note in table.notes.values()} == {live[0].url}


async def test_a_server_that_was_left_paused_is_continued_though_it_could_not_join_before() -> None:
    table = Notes()
    async with wires(2) as live, server(table, *live) as (pool, gate):
        await gate.admin.pause(PauseMode.ABORT)
        live[1].forget("/continue_generation")
        await pool.remove(live[1].url)
        live[1].remember()
        await gate.admin.resume()
        await gate.admin.release_memory((), PauseMode.ABORT)
        with pytest.raises(InvalidRequest, match="memory is released"):
            await pool.add(live[1].url)
        await gate.admin.resume_memory(())
        assert paused(live[1])
        await pool.add(live[1].url)
        assert not paused(live[1]) and not table.notes
