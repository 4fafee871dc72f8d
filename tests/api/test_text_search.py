"""`filter.text`: sessions are found by the texts of their turns, which are indexed in the background."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.store import backup, pruning, text_indexer
from proxy.store.sql import texts
from tests.api.test_replicas import agent, replicas
from tests.databases import execute, meanwhile
from tests.support import Server, assistant, call_text, sampled, says, serving, tool_result, user


async def searched(server: Server, text: str, include: str = "matches", **filters: Any) -> dict[str, Any]:
    """The first page of a search."""
    asked = {"filter": json.dumps({"text": text, **filters}), "include": include}
    answer = await server.http.get("/rl/sessions", params=asked)
    assert answer.status_code == 200, answer.text
    page: dict[str, Any] = answer.json()
    return page


async def names(server: Server, text: str, **filters: Any) -> list[str]:
    """The sessions that a search finds once everything is indexed."""
    await server.app.state.indexer.catch_up()
    page = await searched(server, text, **filters)
    assert page["unindexed"] == 0
    return [each["session_id"] for each in page["sessions"]]


def words(url: str) -> set[str]:
    """The words of the index, as a database shell shows them."""
    if not url.startswith("sqlite"):
        return {word for (word,) in execute(url, "SELECT DISTINCT unnest(tsvector_to_array(words)) FROM turn_words")}
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        connection.execute("CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab(main, turn_words, row)")
        return {word for (word,) in connection.execute("SELECT term FROM temp.vocabulary")}


async def test_a_session_is_found_by_the_words_of_a_turn(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("Der Ofen glüht", "x"), database_url=database_url, search=True) as server:
        await server.chat([user("Warm the OVEN to 200 degrees, see recipes/bread_dough.py")], "bread")
        await server.chat([user("warm the room")], "room")
        assert await names(server, "warm") == ["bread", "room"]
        assert await names(server, "oven warm") == ["bread"]
        assert await names(server, "GLÜHT") == ["bread"]
        assert await names(server, "oven room") == []
        assert await names(server, '"the oven"') == ["bread"]
        assert await names(server, '"oven the"') == []
        assert await names(server, "bread_dough.py") == ["bread"] == await names(server, "dough")
        assert await names(server, "bread.dough.py 200") == ["bread"]
        assert await names(server, "ove") == []
        assert await names(server, "warm", session_ids=["room"]) == ["room"]
        groups = await server.http.get("/rl/groups", params={"filter": json.dumps({"text": "oven"})})
        runs = await server.http.get("/rl/runs", params={"filter": json.dumps({"text": "oven"})})
        assert (groups.json()["groups"], runs.json()["runs"][0]["sessions"]) == ([], 1)


async def test_a_match_names_the_turn_and_shows_its_place(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("one", "two", "three"), database_url=database_url, search=True) as server:
        talk = [user("hi"), assistant("one"), user("a\n\nneedle   in hay"), assistant("two"), user("ok")]
        for length in (1, 3, 5):
            await server.chat(talk[:length], "s")
        assert await names(server, "NEEDLE") == ["s"]
        (entry,) = (await searched(server, "NEEDLE"))["sessions"]
        snippet = {"before": "a ", "match": "needle", "after": " in hay two"}
        turn = (await server.tree("s"))[1]
        assert entry["matches"] == [{"interaction_id": turn["id"], "seq": 1, "snippet": snippet}]
        assert "matches" not in (await searched(server, "needle", include="summary"))["sessions"][0]


async def test_tool_calls_results_and_reasoning_are_found_and_at_most_three_turns_are_shown(
    tmp_path: Path, database_url: str
) -> None:
    called = Reply(sampled("<think>ponderous</think>" + call_text("open_door", '{"key": "brass"}')))
    async with serving(tmp_path, play([called] * 5), database_url=database_url, search=True) as server:
        history = [user("go"), {**assistant(""), "tool_calls": [_call("old_tool", '{"a": "argumental"}')]}]
        history.append(tool_result("c1", "resulting"))
        for number in range(5):
            await server.chat([*history, user(f"round {number}")], "s")
        for text in ("ponderous", "open_door brass", "old_tool argumental", "resulting", '"round 4"'):
            assert await names(server, text) == ["s"], text
        (entry,) = (await searched(server, "brass"))["sessions"]
        assert [each["seq"] for each in entry["matches"]] == [0, 1, 2]


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_a_message_is_indexed_once_and_those_of_a_failed_turn_also(tmp_path: Path, database_url: str) -> None:
    script = play([Reply(sampled("one")), Reply(sampled("two")), Reply(sampled("x"), fault=Fault.ERROR)])
    async with serving(tmp_path, script, database_url=database_url, search=True) as server:
        talk = [user("early"), assistant("one"), user("later"), assistant("two"), user("unlucky")]
        await server.chat(talk[:1], "s")
        await server.chat(talk[:3], "s")
        await server.post("/s/v1/chat/completions", {"messages": talk})
        assert await names(server, "unlucky") == ["s"]
        for text, seq in (("early", 0), ("later", 1), ("unlucky", 2)):
            (entry,) = (await searched(server, text))["sessions"]
            assert [each["seq"] for each in entry["matches"]] == [seq]


HOSTILE = [
    *('"', '""', '"""', 'a" OR "b', "NEAR(needle hay, 2)", "needle*", "text:needle", "-needle", "needle NOT hay"),
    *("'); DROP TABLE sessions; --", "needle & !hay | (hay", "needle:*", "a <-> b", "\\", "%_", "{needle}", "^needle"),
    *("needle AND", "(", "\ud7ff needle", "needle +", "٣ needle", "́needle", "ﬁ needle", "x²"),
]


async def test_no_query_is_an_error_of_the_database_or_finds_more(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("straw"), database_url=database_url, search=True) as server:
        await server.chat([user("needle in a haystack b")], "s")
        assert await names(server, "needle") == ["s"]
        wrong = {}
        for text in HOSTILE:
            answer = await server.http.get("/rl/sessions", params={"filter": json.dumps({"text": text})})
            asked = {word for word in re.findall(r"[^\W_]+", text.lower())}
            known = asked <= {"needle", "in", "a", "haystack", "b", "straw"}
            expected = (200, int(known and text != "needle & !hay")) if asked else (400, None)
            got = answer.status_code, len(answer.json()["sessions"]) if answer.status_code == 200 else None
            if got[0] != expected[0] or (got[1] and not known):
                wrong[text] = got, expected
        assert wrong == {}
        for text in ("x" * 201, "", " ... "):
            answer = await server.http.get("/rl/sessions", params={"filter": json.dumps({"text": text})})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "filter.text")
        answer = await server.http.get("/rl/sessions", params={"include": "matches"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")


async def test_texts_of_every_kind_are_indexed_and_removed(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "_PART", 50)
    odd = ("nul \0 needle", "half \ud800 needle", "x" * 3000 + " needle", "中文 needle 😀", "needle " * 50, "\n")
    async with serving(tmp_path, agent(), database_url=database_url, search=True) as server:
        taken = set()
        for number, text in enumerate((*odd, f"{'many ' * 40} needle")):
            body = json.dumps({"messages": [user(text)]})
            answer = await server.http.post(f"/s{number}/v1/chat/completions", content=body)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 200 and "needle" in text:
                taken.add(f"s{number}")
        assert len(taken) > 4
        assert set(await names(server, "needle")) == taken
        assert await names(server, "many") == ["s6"]
        for entry in (await server.http.get("/rl/sessions")).json()["sessions"]:
            await server.http.delete(f"/rl/sessions/{entry['session_id']}")
        assert (await names(server, "needle"), words(database_url)) == ([], set())


async def test_without_search_the_filter_is_refused_by_name(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("one"), database_url=database_url) as server:
        await server.chat([user("needle")], "s")
        for path in ("/rl/sessions", "/rl/groups", "/rl/runs"):
            answer = await server.http.get(path, params={"filter": json.dumps({"text": "needle"})})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "filter.text")
            assert "--search" in error["message"] and "TOKENGROVE_SEARCH" in error["message"]
        assert "unindexed" not in (await server.http.get("/rl/sessions", params={"include": "counts"})).json()
        assert execute(database_url, "SELECT * FROM indexed_sessions") == []


async def test_an_answer_counts_the_sessions_that_are_not_indexed_yet(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says(*"abc"), database_url=database_url) as server:
        await server.chat([user("needle")], "old")
        await server.ok("/old/rl/end_session", {})
    monkeypatch.setattr(text_indexer.TextIndexer, "run", asyncio.Event().wait)
    async with serving(tmp_path, says(*"abc"), database_url=database_url, search=True) as server:
        await server.chat([user("needle")], "new")
        page = await searched(server, "needle", include="counts")
        assert (page["sessions"], page["unindexed"], page["counts"]["active"]) == ([], 2, 0)
        assert await names(server, "needle") == ["old", "new"]
        await server.chat([user("needle"), assistant("a"), user("more")], "new")
        assert (await searched(server, "needle"))["unindexed"] == 1
        assert (await server.http.get("/rl/sessions", params={"include": "counts"})).json()["unindexed"] == 1


@pytest.mark.parametrize("turns", [1, 2])
async def test_large_sessions_and_many_are_indexed_in_steps(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr(text_indexer, "_TURNS", turns)
    monkeypatch.setattr(text_indexer, "_CHARACTERS", 40 * turns)
    async with serving(tmp_path, agent(), database_url=database_url, search=True) as server:
        for name in "abc":
            for number in range(4):
                await server.chat([user(f"{'long ' * 9} turn {name}{number}")], name)
        for name in "abc":
            for number in range(4):
                assert await names(server, f"{name}{number}") == [name]


@pytest.mark.parametrize(("turns", "characters", "at_once"), [(3, 10**6, 2), (100, 100, 100), (1, 1, 1)])
async def test_what_changed_is_indexed_by_and_by_without_another_look_at_everything(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, turns: int, characters: int, at_once: int
) -> None:
    monkeypatch.setattr(text_indexer.TextIndexer, "run", asyncio.Event().wait)
    for name, value in (("_TURNS", turns), ("_CHARACTERS", characters), ("_SESSIONS", at_once)):
        monkeypatch.setattr(text_indexer, name, value)
    async with serving(tmp_path, agent(), database_url=database_url, search=True) as server:
        indexer = server.app.state.indexer
        await indexer.catch_up()
        for number in range(12):
            await server.chat([user(f"needle {number}")], f"s{number % 5}")
        while await indexer.step() is not None:
            pass
        page = await searched(server, "needle")
        assert (len(page["sessions"]), page["unindexed"]) == (5, 0)
        for number in range(12):
            found = (await searched(server, f"needle {number}"))["sessions"]
            assert [each["session_id"] for each in found] == [f"s{number % 5}"]


async def test_the_words_of_a_deleted_session_leave_the_index(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*"abcd"), database_url=database_url, search=True) as server:
        await server.chat([user("stays")], "kept")
        await server.chat([user("secret")], "gone")
        await server.chat([user("secret"), assistant("b"), user("unindexed")], "gone")
        assert await names(server, "secret") == ["gone"]
        assert (await server.http.delete("/rl/sessions/gone")).status_code == 200
        assert words(database_url) == {"stays", "a"}
        await server.chat([user("new")], "gone")
        assert (await names(server, "secret"), await names(server, "new")) == ([], ["gone"])


async def test_retention_pruning_and_the_archive_remove_words_and_a_restored_session_is_found(
    tmp_path: Path, database_url: str
) -> None:
    archive = str(tmp_path / "archive")
    async with serving(
        tmp_path, says(*"abcd"), database_url=database_url, search=True, keep_days=0.0, archive_to=archive
    ) as server:
        for name in ("one", "two"):
            await server.chat([user(f"needle {name}")], name)
            await server.ok(f"/{name}/rl/end_session", {})
        assert await names(server, "needle") == ["one", "two"]
        await server.ok("/trajectories/export", {"session_ids": ["one"]})
        await server.ok("/rl/grant_capacity", {"n": 1})
        assert await server.app.state.retention.sweep() == 1
        assert (await names(server, "needle"), words(database_url) & {"one", "two"}) == (["two"], {"two"})
    from proxy.store.archive.access import archive_of

    with archive_of(database_url) as opened:
        opened.restore(["one"])
    async with serving(tmp_path, says(*"abcd"), database_url=database_url, search=True) as server:
        assert await names(server, "needle") == ["one", "two"]
        await server.ok("/trajectories/export", {"session_ids": ["one", "two"]})
        await server.ok("/rl/grant_capacity", {"n": 1})
    assert pruning.prune(database_url, 0, dry_run=False).sessions == 2
    assert words(database_url) == set()
    if (file := tmp_path / "grove.db").exists():
        assert b"needle" not in file.read_bytes()


async def test_an_imported_session_is_found(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("a"), database_url=database_url, search=True) as server:
        await server.chat([user("needle")], "s")
        assert await names(server, "needle") == ["s"]
    dump = tmp_path / "dump.jsonl"
    backup.export_all(database_url, str(dump), lambda _: None)
    restored = f"sqlite:///{tmp_path / 'restored.db'}"
    backup.import_all(restored, dump, backup.Conflict.REFUSE, lambda _: None)
    async with serving(tmp_path, says("a"), database_url=restored, search=True) as server:
        assert await names(server, "needle") == ["s"]


async def test_servers_of_one_database_index_each_turn_once_and_one_at_a_time(
    tmp_path: Path, postgres_url: str
) -> None:
    async with replicas(tmp_path, postgres_url, says(*"abcdefgh"), says(*"abcdefgh"), search=True) as (one, two):
        for number in range(4):
            await one.chat([user(f"needle one{number}")], f"s{number}")
            await two.chat([user(f"needle two{number}")], f"s{number}")
        await asyncio.gather(*(server.app.state.indexer.catch_up() for server in (one, two) for _ in range(3)))
        assert len(await names(one, "needle")) == 4 == len(await names(two, "one0")) + 3
        counted = execute(postgres_url, "SELECT count(*), count(DISTINCT (session_id, seq)) FROM turn_words")
        assert counted == [(8, 8)]
        await one.chat([user("later")], "s0")
        with meanwhile(postgres_url, f"SELECT pg_advisory_xact_lock({texts._PLACE})"):
            await two.app.state.indexer.catch_up()
            await one.app.state.indexer.catch_up()
            assert (await searched(two, "later"))["unindexed"] == 1
        assert await names(two, "later") == ["s0"]


async def test_what_a_server_without_the_index_deleted_leaves_it_at_the_next_start(
    tmp_path: Path, database_url: str
) -> None:
    async with serving(tmp_path, says(*"ab"), database_url=database_url, search=True) as server:
        await server.chat([user("kept needle")], "kept")
        await server.chat([user("secret needle")], "gone")
        assert await names(server, "needle") == ["kept", "gone"]
    for table in ("unreplied", "interactions", "sessions"):
        execute(database_url, f"DELETE FROM {table} WHERE session_id = 'gone'")
    async with serving(tmp_path, says(*"ab"), database_url=database_url, search=True) as server:
        await server.chat([user("another")], "gone")  # on SQLite it has the number of the old one
        assert (await names(server, "needle"), await names(server, "another")) == (["kept"], ["gone"])
        assert "secret" not in words(database_url)


async def test_a_damaged_turn_delays_no_deletion(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    async with serving(tmp_path, says(*"ab"), database_url=url, search=True) as server:
        await server.chat([user("needle")], "kept")
        await server.chat([user("secret")], "gone")
        assert await names(server, "secret") == ["gone"]
        execute(url, "UPDATE interactions SET new_messages = x'7a00' WHERE session_id = 'gone'")
        assert (await server.http.delete("/rl/sessions/gone")).status_code == 200
        assert await names(server, "needle") == ["kept"]
        assert "secret" not in words(url)


async def test_a_search_without_an_end_is_refused(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says(*"ab"), database_url=database_url, search=True) as server:
        await server.chat([user("needle")], "s")
        assert await names(server, "needle") == ["s"]
        monkeypatch.setattr(texts, "_SEARCH_S", 0.001)
        monkeypatch.setattr(texts, "_STEPS", 1)
        slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
        monkeypatch.setattr(
            "proxy.store.sql.reads.find_listed", lambda connection, _: connection.exec_driver_sql(slow).all()
        )
        answer = await server.http.get("/rl/sessions", params={"filter": json.dumps({"text": "needle"})})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "filter.text")
        assert "rarer words" in answer.json()["error"]["message"]
        monkeypatch.undo()
        assert await names(server, "needle") == ["s"]


@pytest.mark.parametrize(("used", "rest_s"), [(1.0, 19.0), (0.5, 38.0), (0.01, 99.0)])
async def test_while_turns_run_the_indexer_rests_until_they_used_19_times_its_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: float, rest_s: float
) -> None:
    async with serving(tmp_path, says(*"abc"), search=True) as server:
        indexer, clock = server.app.state.indexer, Clock(used)
        monkeypatch.setattr(text_indexer, "time", clock)
        monkeypatch.setattr(text_indexer, "asyncio", clock)
        monkeypatch.setattr(indexer, "_busy", lambda: clock.wall < 1000)
        await indexer._rest(1.0)
        assert clock.wall == pytest.approx(rest_s, abs=text_indexer._LOOK_S)
        monkeypatch.setattr(indexer, "_busy", lambda: False)
        await indexer._rest(1.0)
        assert clock.wall == pytest.approx(rest_s, abs=text_indexer._LOOK_S)


class Clock:
    """Time that passes while somebody sleeps. `used`: cores that the process uses."""

    def __init__(self, used: float) -> None:
        self.wall, self._used = 0.0, used

    def monotonic(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.wall * self._used

    async def sleep(self, seconds: float) -> None:
        self.wall += seconds


async def test_an_undecodable_turn_is_left_out_and_the_rest_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    async with serving(tmp_path, says(*"ab"), database_url=url) as server:
        await server.chat([user("needle")], "broken")
        await server.chat([user("needle")], "whole")
    execute(url, "UPDATE interactions SET new_messages = x'7a00' WHERE session_id = 'broken'")
    async with serving(tmp_path, says(*"ab"), database_url=url, search=True) as server:
        assert await names(server, "needle") == ["whole"]
    assert "a damaged turn is not indexed" in caplog.text
