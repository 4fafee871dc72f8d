"""Rows that a newer server wrote into the same database are read without what this version does not know."""

from __future__ import annotations

from proxy.store.sql.codec import encode_json
from proxy.store.store import Store
from proxy.types import SessionRecord
from tests.databases import execute
from tests.interactions import interaction
from tokengrove.reasons import Reason, Status


async def test_unknown_words_keys_and_columns_of_a_newer_server_are_passed_over(database_url: str) -> None:
    store = Store.open(database_url)
    await store.starts.create_session(SessionRecord("s"))
    await store.turns.append(interaction("i"))
    execute(database_url, "ALTER TABLE interactions ADD COLUMN mood TEXT DEFAULT 'calm'")
    execute(database_url, "UPDATE interactions SET reason = 'dreamt'")
    for column, value in (("sampling", {"temperature": 0.5, "warmth": 2}), ("notes", {"echo": ["sung"], "mood": 1})):
        digits = (encode_json(value) or b"").hex()
        literal = f"X'{digits}'" if "sqlite" in database_url else f"'\\x{digits}'"
        execute(database_url, f"UPDATE interactions SET {column} = {literal}")
    [read] = await store.recordings.load_interactions("s")
    assert (read.reason, read.reason.meaning, read.echo) == ("dreamt", "A newer version wrote it.", ("sung",))
    assert (read.sampling.temperature, read.status, read.output_ids) == (
        0.5,
        Status.COMPLETE,
        interaction("i").output_ids,
    )
    assert "dreamt" not in list(Reason)
    await store.turns.append(interaction("j", parent="i"))
    assert len(await store.recordings.load_interactions("s")) == 2
    await store.close()
