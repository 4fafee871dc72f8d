"""Listings of sessions: their order, summaries, counts and filters, in pages of bounded work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.api import listing
from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.support import Server, assistant, sampled, says, serving, user


async def listed(server: Server, filter: dict[str, Any] | None = None, **params: Any) -> list[dict[str, Any]]:
    """The entries of all pages."""
    entries: list[dict[str, Any]] = []
    cursor: str | None = None
    while True:
        asked = {
            **params,
            **({"filter": json.dumps(filter)} if filter else {}),
            **({"cursor": cursor} if cursor else {}),
        }
        answer = await server.http.get("/rl/sessions", params=asked)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        entries += page["sessions"]
        cursor = page["cursor"]
        if cursor is None:
            return entries


async def names(server: Server, filter: dict[str, Any] | None = None, **params: Any) -> list[str]:
    return [entry["session_id"] for entry in await listed(server, filter, **params)]


async def recorded(server: Server) -> None:
    """`plain`: one turn, rewarded 1. `edited`: two turns and a fork, rewarded 0.25 and 0.5. `empty`: no turn."""
    await server.ok("/rl/start_session", {"session_id": "plain", "task_id": "sum", "group_id": "g1"})
    await server.chat([user("hi")], "plain")
    await server.ok("/plain/rl/end_session", {"reward": 1})
    await server.ok("/rl/start_session", {"session_id": "edited", "task_id": "sort", "group_id": "g1", "discount": 0.5})
    for messages in (
        [user("hi")],
        [user("hi"), assistant("b"), user("more")],
        [user("hi"), assistant("edited"), user("more")],
    ):
        await server.chat(messages, "edited")
    await server.ok("/edited/rl/set_reward", {"turn": 1, "reward": 0.25})
    await server.ok("/edited/rl/set_reward", {"turn": 2, "reward": 0.5})
    await server.ok("/rl/start_session", {"session_id": "empty", "task_id": "50%_\\x"})


ANSWERS = ("a", "b", "c", "d")


async def test_a_summary_has_what_an_export_would_say(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*ANSWERS), database_url=database_url) as server:
        await recorded(server)
        plain, edited, empty = (entry["summary"] for entry in await listed(server, include="summary"))
        exported = (await server.ok("/trajectories/export", {"session_id": "edited"}))["sessions"][0]
        assert edited["score"] == exported["score"] == 0.75
        assert edited["reasons"] == exported["reasons"]
        assert (edited["turns"], edited["forks"], plain["forks"]) == (3, 1, 0)
        tree = (await server.http.get("/rl/sessions/edited")).json()
        returns = [turn["return"] for turn in tree["interactions"]]
        assert edited["returns"] == {
            "first": returns[0],
            "mean": pytest.approx(sum(returns) / 3),
            "min": min(returns),
            "max": max(returns),
        }
        assert edited["prompt_tokens"] == sum(turn["prompt_tokens"] for turn in tree["interactions"])
        assert edited["output_tokens"] == sum(turn["output_tokens"] for turn in tree["interactions"])
        assert edited["purposes"] == {"main": 3} and edited["versions"] == [0, 0]
        assert (empty["turns"], empty["score"], empty["versions"], empty["rewarded"]) == (0, None, None, False)
        assert empty["returns"] == dict.fromkeys(("first", "mean", "min", "max"))


async def test_a_kept_summary_follows_every_change(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*ANSWERS, *ANSWERS)) as server:
        await recorded(server)

        async def summary(name: str) -> dict[str, Any]:
            (entry,) = await listed(server, {"search": name}, include="summary")
            found: dict[str, Any] = entry["summary"]
            return found

        assert (await summary("empty"))["turns"] == 0
        await server.chat([user("hi")], "empty")
        assert ((await summary("empty"))["turns"], (await summary("empty"))["score"]) == (1, None)
        await server.ok("/empty/rl/set_reward", {"reward": 3})
        assert (await summary("empty"))["score"] == 3
        assert (await server.http.delete("/rl/sessions/empty")).status_code == 200
        await server.ok("/rl/start_session", {"session_id": "empty"})
        await server.chat([user("hi")], "empty")
        assert ((await summary("empty"))["turns"], (await summary("empty"))["score"]) == (1, None)


FILTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"reward": 1}, ["plain"]),
    ({"reward": {"min": 0.5}}, ["plain", "edited"]),
    ({"reward": {"max": 0.9}}, ["edited"]),
    ({"reward": [1, 0.75]}, ["plain", "edited"]),
    ({"reward": 7}, []),
    ({"forked": True}, ["edited"]),
    ({"forked": False}, ["plain", "empty"]),
    ({"purpose": "main"}, ["plain", "edited"]),
    ({"purpose": "title"}, []),
    ({"version": 0}, ["plain", "edited", "empty"]),
    ({"version": {"min": 1}}, []),
    ({"version": {"max": 0.5}, "group_id": "g1"}, ["plain", "edited"]),
    ({"session_ids": ["empty", "plain", "unknown"]}, ["plain", "empty"]),
    ({"session_ids": []}, []),
    ({"session_ids": ["edited", "plain"], "forked": True}, ["edited"]),
    ({"search": "LAI"}, ["plain"]),
    ({"search": "so"}, ["edited"]),
    ({"search": "g1"}, ["plain", "edited"]),
    ({"search": "%_\\"}, ["empty"]),
    ({"search": "%"}, ["empty"]),
    ({"forked": False, "status": "active"}, ["empty"]),
    ({"forked": True, "metadata": {"env": None}}, ["edited"]),
]


async def test_the_listing_selects_by_what_turns_come_to(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says(*ANSWERS), database_url=database_url) as server:
        await recorded(server)
        for filter, chosen in FILTERS:
            assert await names(server, filter) == chosen, filter
            assert await names(server, filter, limit=1, order="newest") == chosen[::-1], filter
        # However little of the work one request may do, its cursor goes on.
        monkeypatch.setattr(listing, "_MOST_SESSIONS", 1)
        monkeypatch.setattr(listing, "_PIECE", 1)
        for filter, chosen in FILTERS:
            assert await names(server, filter, include="summary") == chosen, filter
            assert await names(server, filter, order="newest") == chosen[::-1], filter


async def test_a_page_may_be_short_and_says_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_MOST_SESSIONS", 1)
    monkeypatch.setattr(listing, "_PIECE", 1)
    async with serving(tmp_path, says(*ANSWERS)) as server:
        await recorded(server)
        page = (await server.http.get("/rl/sessions", params={"filter": '{"forked": true}'})).json()
        assert page == {"sessions": [], "cursor": "plain"}


async def test_pages_hold_few_turns_but_at_least_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PIECE_TURNS", 0)
    monkeypatch.setattr(listing, "_MOST_TURNS", 1)
    async with serving(tmp_path, says(*ANSWERS)) as server:
        await recorded(server)
        page = (await server.http.get("/rl/sessions", params={"include": "summary"})).json()
        assert ([entry["session_id"] for entry in page["sessions"]], page["cursor"]) == (["plain"], "plain")
        assert await names(server, include="summary") == ["plain", "edited", "empty"]


async def test_counts_are_of_all_sessions_that_match_but_for_the_status(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*ANSWERS), database_url=database_url) as server:
        await recorded(server)

        async def counts(filter: dict[str, Any]) -> Any:
            params = {"include": "counts", "limit": 1, "filter": json.dumps(filter)}
            return (await server.http.get("/rl/sessions", params=params)).json()["counts"]

        assert await counts({}) == {"active": 2, "ended": 1, "expired": 0}
        assert await counts({"status": "ended"}) == {"active": 2, "ended": 1, "expired": 0}
        assert await counts({"group_id": "g1"}) == {"active": 1, "ended": 1, "expired": 0}
        assert await counts({"forked": True}) is None
        assert await counts({"metadata": {"env": None}}) is None
        params = {"include": "counts", "limit": 1, "cursor": "plain"}
        assert (await server.http.get("/rl/sessions", params=params)).json()["counts"] == await counts({})


async def test_the_tokens_of_a_turn_that_failed_are_not_summed_up(tmp_path: Path, database_url: str) -> None:
    replies = [Reply(sampled("one")), Reply(sampled("two"), fault=Fault.ERROR)]
    async with serving(tmp_path, play(replies), database_url=database_url) as server:
        await server.chat([user("hi")], "s")
        await server.post("/s/v1/chat/completions", {"messages": [user("another")]})
        (entry,) = await listed(server, include="summary")
        complete = next(
            turn
            for turn in (await server.http.get("/rl/sessions/s")).json()["interactions"]
            if turn["status"] == "complete"
        )
        found = entry["summary"]
        assert (found["turns"], found["failed"], found["aborted"]) == (1, 1, 0)
        assert [found[name] for name in ("prompt_tokens", "output_tokens")] == [
            complete[name] for name in ("prompt_tokens", "output_tokens")
        ]


async def test_the_longest_search_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        assert await names(server, {"search": "x" * 200}) == []


async def test_the_returns_of_all_turns_come_with_their_session(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*ANSWERS)) as server:
        await recorded(server)
        (entry,) = await listed(server, {"search": "edited"}, include="returns")
        tree = (await server.http.get("/rl/sessions/edited")).json()
        assert entry["summary"]["returns"]["values"] == [turn["return"] for turn in tree["interactions"]]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"order": "random"}, "order"),
        ({"include": "summary,all"}, "include"),
        ({"filter": '{"reward": "high"}'}, "filter.reward"),
        ({"filter": '{"reward": true}'}, "filter.reward"),
        ({"filter": '{"reward": {}}'}, "filter.reward"),
        ({"filter": '{"version": {"least": 1}}'}, "filter.version.least"),
        ({"filter": '{"version": 1e300}'}, "filter.version"),
        ({"filter": '{"purpose": "fun"}'}, "filter.purpose"),
        ({"filter": '{"forked": "yes"}'}, "filter.forked"),
        ({"filter": '{"session_ids": "a"}'}, "filter.session_ids"),
        ({"filter": '{"session_ids": [1]}'}, "filter.session_ids[0]"),
        ({"filter": json.dumps({"session_ids": ["a"] * 1001})}, "filter.session_ids"),
        ({"filter": '{"search": ""}'}, "filter.search"),
        ({"filter": '{"search": 1}'}, "filter.search"),
        ({"filter": json.dumps({"search": "x" * 201})}, "filter.search"),
        ({"filter": '{"search": "\\u0000"}'}, "filter.search"),
        ({"filter": '{"agent": "a"}'}, "filter.agent"),
        ({"cursor": "nobody"}, "cursor"),
        ({"cursor": "nobody", "include": "summary"}, "cursor"),
    ],
)
async def test_errors_of_a_listing_name_the_field(tmp_path: Path, params: dict[str, str], param: str) -> None:
    async with serving(tmp_path, says()) as server:
        refused = await server.http.get("/rl/sessions", params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
