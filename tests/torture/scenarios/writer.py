"""Changes of the store from many tasks while its thread commits: each is committed once, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from sqlalchemy import Connection, create_engine, event, text

from proxy.store.writer import Writer
from tests.torture.fibres import give_way
from tests.torture.runs import World, scenario
from tokengrove.errors import StoreUnavailable


def _insert(connection: Connection, payloads: list[Any]) -> list[Any]:
    connection.execute(text("INSERT INTO seen VALUES (:number)"), [{"number": number} for number in payloads])
    return list(payloads)


@scenario
async def writer_commits(world: World) -> None:
    """Each change is done once it is answered, within moments; at the end the thread ends."""
    engine = create_engine(f"sqlite:///{world.folder}/w.db", connect_args={"check_same_thread": False})
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE seen (number INTEGER)"))
    event.listen(engine, "commit", lambda _: give_way())
    writer, answered, noted = Writer(engine), Counter[int](), Counter[int]()

    async def caller(first: int) -> None:
        for number in range(first, first + world.random.randrange(1, 6)):
            await world.some_time(0.05)
            if world.random.random() < 0.2:
                writer.note(_insert, number)
                noted[number] += 1
                continue
            began = world.loop.time()
            done = await world.abandon_some(_put(writer, number, urgent=world.random.random() < 0.7), 0.05, 0.1)
            if done is None:
                noted[number] += 0
            else:
                answered[number] += 1
                assert world.loop.time() - began < 30.0, "nobody woke the writer"

    await world.all(*(caller(100 * number) for number in range(6)))
    writer.stop()
    try:
        writer.note(_insert, -1)
    except StoreUnavailable:
        pass
    else:
        raise AssertionError("a closed writer took a change")
    await asyncio.to_thread(writer.join)
    with engine.begin() as connection:
        stored = Counter(connection.execute(text("SELECT number FROM seen")).scalars())
    assert not [number for number, count in stored.items() if count > 1]
    assert not (answered - stored) and not (noted - stored)
    engine.dispose()


async def _put(writer: Writer, number: int, *, urgent: bool) -> Any:
    return await writer.submit(_insert, number, urgent=urgent)
