"""Fills a database with sessions of every kind: `python -m tests.browser.data sqlite:////tmp/x/x.db [--many 10000]`.

Most of it comes through the server's own API. `many` writes rows as older servers left them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import time
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, insert, make_url, text

from proxy.store import schema
from proxy.store.sql.tables import intents, interactions, sessions
from tests.browser import episodes, image_episodes
from tests.browser.feed import feeding

HOUR = 3600.0


async def fill_kinds(url: str, *, hostile: bool = True, long: bool = True) -> None:
    """Store a session of every kind: some 60 sessions, which takes six seconds."""
    async with feeding(url, thinking_retention="template") as feed:
        await episodes.forgetting(feed)
    async with feeding(url) as feed:
        spread = (
            (0.0, 0.25, 1.0, 1.0),
            (1.0, 1.0, 1.0, 1.0),
            (0.0, 0.0, 0.5, 0.75, 1.0, -1.0, 0.1, 0.9),
            (0.2, None, 0.4),
        )
        for version, rewards in enumerate(spread):
            await episodes.group(
                feed, f"sum-{version}", rewards, version, metadata={"project": "sums", "step": version}
            )
        await episodes.trained(feed)
        await episodes.versions(feed, first=len(spread))
        for episode in (episodes.chain, episodes.forks, episodes.failures, episodes.several_agents, episodes.marked):
            await episode(feed)
        await episodes.chain(feed, "chain/long", 30, group_id="chains")
        if long:
            await episodes.long_path(feed)
        if hostile:
            await episodes.hostile_texts(feed)
            await episodes.long_lines(feed)
        await episodes.unfinished(feed)
    await fill_images(url, hostile=hostile, long=long)
    _age(url)


async def fill_images(url: str, *, hostile: bool = False, long: bool = False) -> None:
    """Store sessions of a vision model."""
    async with feeding(url, image_episodes.seeing_renderer()) as feed:
        await image_episodes.browsing(feed)
        if long:
            await image_episodes.many(feed)
        if hostile:
            await image_episodes.hostile_images(feed)


def fill_many(url: str, number: int = 10_000) -> None:
    """Store `number` sessions of two turns, in groups of eight, ended, expired and live, over the last day."""
    drawn, now = random.Random(1), time.time()
    rows, turns = [], []
    for index in range(number):
        name, begun = f"many-{index:05}", now - 24 * HOUR * (1 - index / number)
        status = "expired" if index % 50 == 7 else "active" if index % 40 == 3 else "ended"
        rows.append(_session(name, index, begun, status))
        turns += [_turn(name, seq, begun, drawn, status) for seq in range(2)]
    engine = create_engine(make_url(url))
    with engine.begin() as connection:
        connection.execute(insert(sessions), rows)
        connection.execute(insert(interactions), turns)
    engine.dispose()


def fill_long(url: str, name: str, number: int) -> None:
    """Store a live session of `number` turns, each of which continues the one before it."""
    drawn, now = random.Random(1), time.time()
    turns = [_turn(name, seq, now, drawn, "active") for seq in range(number)]
    for seq, turn in enumerate(turns[1:], 1):
        turn |= {"parent_id": f"{name}-{seq - 1}", "reason": "continued"}
        turn |= {"new_messages": b'j[{"role":"user","content":"question %d"}]' % seq}
        turn |= {"output": b'j{"role":"assistant","content":"answer %d"}' % seq}
    engine = create_engine(make_url(url))
    with engine.begin() as connection:
        connection.execute(insert(sessions), [{**_session(name, 0, now, "active"), "next_seq": number}])
        connection.execute(insert(interactions), turns)
    engine.dispose()


def _session(name: str, index: int, begun: float, status: str) -> dict[str, Any]:
    ended = None if status == "active" else begun + 30
    return {
        **{"session_id": name, "task_id": f"task-{index // 8:04}", "group_id": f"group-{index // 8:04}"},
        **{"status": status, "discount": 1.0, "credit": "tree", "weight_version": index // 100, "next_seq": 2},
        **{"created_at": begun, "updated_at": begun + 30, "ended_at": ended},
        "ended_order": None if status == "active" else 1_000_000 + index,
    }


def _turn(name: str, seq: int, begun: float, drawn: random.Random, status: str) -> dict[str, Any]:
    number = drawn.randrange(4, 30)
    return {
        **{"id": f"{name}-{seq}", "session_id": name, "seq": seq, "parent_id": None, "aligned": False},
        **{"reason": "new_root" if seq else "first", "api": "chat", "status": "complete", "model": "m"},
        **{"request_hash": f"{name}-{seq}", "prefix_length": 0, "prompt_tokens": 9, "output_tokens": number},
        **{"prompt_suffix": bytes(4 * 9), "output_ids": bytes(4 * number), "logprobs": bytes(4 * number)},
        **{"versions": b"j[[%d,0]]" % number, "trainable": True, "reasoning_tokens": 0, "finish_reason": "stop"},
        **{"output": b'j{"role":"assistant","content":"yes"}', "new_messages": b'j[{"role":"user","content":"hi"}]'},
        **{
            "sampling": b'j{"temperature":1.0}',
            "reward": round(drawn.random(), 2) if seq and status == "ended" else None,
        },
        **{"created_at": begun + seq, "first_token_at": begun + seq + 0.2, "completed_at": begun + seq + 0.9},
    }


_AGES = (
    # What no request makes: a session that was idle for too long, a turn that the server's crash cut, a bug, and words
    # of a newer server.
    "UPDATE sessions SET status = 'expired', ended_at = updated_at + 600, exit_reason = 'unused for 600 s', "
    "ended_order = 1000000000 WHERE session_id = 'expired/idle'",
    "UPDATE interactions SET reason = 'drift', aligned = :no WHERE session_id = 'forks/template' AND seq = 3",
    "UPDATE interactions SET reason = 'transplanted' WHERE session_id = 'forks/template' AND seq = 2",
)


def _age(url: str) -> None:
    """Spread the sessions over the last two hours, and add what no request makes."""
    engine, now = create_engine(make_url(url)), time.time()
    with engine.begin() as connection:
        for statement in _AGES:
            connection.execute(text(statement), {"no": False} if ":no" in statement else {})
        begun = {"interaction_id": "chatcmpl-cut", "session_id": "live/waiting", "begun_at": now - 60}
        connection.execute(insert(intents), [begun])
        names = [row[0] for row in connection.execute(text("SELECT session_id FROM sessions ORDER BY number"))]
        for place, name in enumerate(names):
            _shift(connection, name, 2 * HOUR * (1 - (place + 1) / len(names)))
    engine.dispose()


def _shift(connection: Any, session: str, seconds: float) -> None:
    for table, columns in (
        ("sessions", ("created_at", "updated_at", "ended_at")),
        ("interactions", ("created_at", "first_token_at", "completed_at")),
    ):
        changes = ", ".join(f"{column} = {column} - :s" for column in columns)
        connection.execute(
            text(f"UPDATE {table} SET {changes} WHERE session_id = :name"), {"s": seconds, "name": session}
        )


def prepare(url: str) -> None:
    """Make the folder of a SQLite file, and the tables."""
    parsed = make_url(url)
    if parsed.drivername.startswith("sqlite") and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    schema.upgrade(url)


def main() -> None:
    """Read the command line and fill the database."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="SQLAlchemy URL of the database: sqlite:////tmp/x/x.db")
    parser.add_argument("--many", type=int, default=0, help="so many sessions of two turns besides")
    parser.add_argument("--no-hostile", action="store_true", help="without hostile texts")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # of turns that fail on purpose
    prepare(given.url)
    asyncio.run(fill_kinds(given.url, hostile=not given.no_hostile))
    if given.many:
        fill_many(given.url, given.many)
    print(f"tokengrove serve --engine scripted --engine-arg play=agent --database-url {given.url}")


if __name__ == "__main__":
    main()
