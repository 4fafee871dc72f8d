"""Listings in the order of a value, in pages of exact results and bounded work, and their filters by ranges of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.api import sorted_listing
from tests.api.test_listings import listed, names
from tests.support import Server, assistant, says, serving, user
from tokengrove import AsyncClient
from tokengrove.errors import InvalidRequest

REWARDS = {"a": 0.5, "b": -1, "c": 0.5, "d": 2, "e": None, "f": 0}
STEPS = {"a": 1, "b": 10, "c": 2.5, "d": "late", "e": {"is": "odd"}, "f": True}


async def recorded(server: Server) -> None:
    """Sessions `a` to `f` of one to six turns. `b` and `e` have forks; `a` and `c` have one reward."""
    for number, (name, reward) in enumerate(REWARDS.items(), 1):
        metadata = {"step": STEPS[name], **({"run": name} if number % 2 else {})}
        await server.ok("/rl/start_session", {"session_id": name, "metadata": metadata})
        history = [user("hi")]
        for turn in range(number):
            history += [await server.answer(history, name), user(f"more {turn}")]
        if name in "be":
            await server.chat([user("hi"), assistant("edited"), user("more")], name)
        await server.ok(f"/{name}/rl/end_session", {"metrics": {"steps": -number}})
        if reward is not None:
            await server.ok(f"/{name}/rl/set_reward", {"reward": reward})


ORDERS: list[tuple[str, str]] = [
    ("reward", "bfacde"),
    ("-reward", "dacfbe"),
    ("turns", "abcdef"),
    ("-turns", "efdbca"),
    ("forks", "acdfbe"),
    ("-forks", "beacdf"),
    ("metadata.step", "acbdfe"),
    ("-metadata.step", "fdbcae"),
    ("metadata.run", "acebdf"),
    ("-metadata.run", "ecabdf"),
    ("metadata.nothing", "abcdef"),
    ("-metadata.nothing", "abcdef"),
    ("metrics.steps", "fedcba"),
    ("-metrics.steps", "abcdef"),
    ("lost", "abcdef"),
]


async def test_a_listing_is_in_the_order_of_a_value_with_missing_ones_last(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*["x"] * 40), database_url=database_url) as server:
        await recorded(server)
        for order, expected in ORDERS:
            for limit in (1, 2, 5, 100):
                for include in ("", "summary"):
                    found = await names(server, order=order, limit=limit, include=include)
                    assert "".join(found) == expected, (order, limit)


@pytest.mark.parametrize("value", ["turns", "tokens", "prompt_tokens", "output_tokens", "duration", "forks", "lost"])
async def test_an_order_and_a_range_agree_with_the_entries(tmp_path: Path, value: str) -> None:
    async with serving(tmp_path, says(*["x", "longer", "y"] * 12)) as server:
        await recorded(server)

        def of(entry: dict[str, Any]) -> float:
            summary = entry["summary"]
            if value == "duration":
                return float(entry["ended_at"] - entry["created_at"])
            if value == "tokens":
                return float(summary["prompt_tokens"] + summary["output_tokens"])
            return float(summary["failed"] + summary["aborted"] if value == "lost" else summary[value])

        entries = await listed(server, include="summary")
        values = {entry["session_id"]: of(entry) for entry in entries}
        expected = sorted(values, key=values.__getitem__)
        assert await names(server, order=value, limit=2) == expected
        middle = sorted(values.values())[3]
        assert await names(server, {value: {"min": middle}}) == [name for name in values if values[name] >= middle]
        assert await names(server, {value: {"max": middle}}) == [name for name in values if values[name] <= middle]
        assert await names(server, {value: middle}) == [name for name in values if values[name] == middle]


async def test_the_filter_of_a_sorted_listing_selects_first(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["x"] * 40)) as server:
        await recorded(server)
        assert "".join(await names(server, {"reward": {"min": 0}}, order="-turns")) == "fdca"
        assert "".join(await names(server, {"metadata": {"step": {"min": 2}}}, order="reward", limit=1)) == "bc"
        assert "".join(await names(server, {"session_ids": ["f", "a", "d"]}, order="reward")) == "fad"


async def test_pages_go_on_behind_the_last_value_whatever_changed_since(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*["x"] * 40), database_url=database_url) as server:
        await recorded(server)
        query = {"order": "reward", "limit": 3}
        first = (await server.http.get("/rl/sessions", params=query)).json()
        assert [entry["session_id"] for entry in first["sessions"]] == ["b", "f", "a"]
        await server.ok("/a/rl/set_reward", {"reward": -3})  # the last session of the page moves to the front
        assert (await server.http.delete("/rl/sessions/b")).status_code == 200
        await server.ok("/e/rl/set_reward", {"reward": 1})
        second = (await server.http.get("/rl/sessions", params={**query, "cursor": first["cursor"]})).json()
        assert [entry["session_id"] for entry in second["sessions"]] == ["c", "e", "d"]
        assert second["cursor"] is None


async def test_more_sessions_than_can_be_sorted_are_refused_unless_the_newest_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says(*["x"] * 40)) as server:
        await recorded(server)
        for name, most in (("MOST_SORTED", 3), ("MOST_TURNS", 16)):  # e and f have 12 turns, d has 4
            with monkeypatch.context() as patch:
                patch.setattr(sorted_listing, name, most)
                refused = await server.http.get("/rl/sessions", params={"order": "reward"})
                assert refused.status_code == 400, refused.text
                assert refused.json()["error"]["param"] == "order"
                assert f"more than {most}" in refused.json()["error"]["message"]
                page = (await server.http.get("/rl/sessions", params={"order": "reward", "partial": "true"})).json()
                assert [entry["session_id"] for entry in page["sessions"]] == ["f", "d", "e"]
                assert page["sorted"] == {"sessions": 3, "whole": False}
                few = await server.http.get(
                    "/rl/sessions", params={"order": "reward", "filter": '{"session_ids": ["d", "f"]}'}
                )
                assert few.json()["sorted"] == {"sessions": 2, "whole": True}
        with monkeypatch.context() as patch:
            patch.setattr(sorted_listing, "MOST_TURNS", 1)
            assert len(await names(server, order="metadata.step")) == 6, "no turn is read"


async def test_what_is_kept_while_sorting_is_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    smallest = sorted_listing.nsmallest

    def watched(count: int, candidates: Any, **more: Any) -> Any:
        kept.append(len(found := list(candidates)))
        return smallest(count, found, **more)

    monkeypatch.setattr(sorted_listing, "nsmallest", watched)
    monkeypatch.setattr(sorted_listing, "PIECE", 2)
    async with serving(tmp_path, says(*["x"] * 40)) as server:
        await recorded(server)
        answer = await server.http.get("/rl/sessions", params={"order": "reward", "limit": 1})
        assert [entry["session_id"] for entry in answer.json()["sessions"]] == ["b"]
    assert len(kept) == 3 and max(kept) <= 4


async def test_sessions_of_a_step_of_a_trainer_can_be_listed(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*["x"] * 40), database_url=database_url) as server:
        await recorded(server)
        async with AsyncClient(app=server.app) as client:
            for step, chosen in ((3, ("a", "d", "b")), (4, ("d",))):
                for name in chosen:
                    samples = (await client.export(session_id=name, layout="individual")).samples
                    await client.annotate(
                        samples, step, {"is_masked": [each.loss_mask * 0 > 1 for each in samples]}, trainer="a:b"
                    )
            page = await client.session_page({"trained_in": "a:b/3"}, order="reward", limit=2)
            assert [entry["session_id"] for entry in page["sessions"]] == ["b", "a"]
            assert len(await client.sessions({"trained_in": "a:b/3"}, order="-reward")) == 3
            assert await client.sessions({"trained_in": "a/3"}) == []
            with pytest.raises(InvalidRequest, match="TRAINER/STEP"):
                await client.sessions({"trained_in": "a"})


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"order": "rewards"}, "order"),
        ({"order": "--reward"}, "order"),
        ({"order": "-oldest"}, "order"),
        ({"order": "metadata."}, "order"),
        ({"order": "metadata." + "x" * 201}, "order"),
        ({"order": "newest", "partial": "true"}, "partial"),
        ({"order": "reward", "partial": "yes"}, "partial"),
        ({"order": "reward", "cursor": "a"}, "cursor"),
        ({"order": "reward", "cursor": "W10"}, "cursor"),
        ({"filter": json.dumps({"turns": "many"})}, "filter.turns"),
        ({"filter": json.dumps({"duration": {"least": 1}})}, "filter.duration.least"),
        ({"filter": json.dumps({"trained_in": f"a/{10**30}"})}, "filter.trained_in"),
    ],
)
async def test_a_wrong_order_is_named(tmp_path: Path, query: dict[str, str], param: str) -> None:
    async with serving(tmp_path, says("x")) as server:
        refused = await server.http.get("/rl/sessions", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_a_cursor_of_another_order_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["x"] * 40)) as server:
        await recorded(server)
        page = (await server.http.get("/rl/sessions", params={"order": "reward", "limit": 1})).json()
        query = {"order": "-reward", "cursor": page["cursor"]}
        refused = await server.http.get("/rl/sessions", params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cursor")


async def test_long_texts_are_compared_by_their_beginning_and_fit_a_cursor(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for name, text in (("a", "y" * 5000), ("b", "x" * 5000 + "z"), ("c", "x" * 5000)):
            await server.ok("/rl/start_session", {"session_id": name, "metadata": {"text": text}})
        page = (await server.http.get("/rl/sessions", params={"order": "metadata.text", "limit": 1})).json()
        assert len(page["cursor"]) < 1000
        assert await names(server, order="metadata.text", limit=1) == ["b", "c", "a"]
