"""The listing of groups: their order, counts and scores, in pages of bounded work."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from proxy.api import listing
from tests.support import Server, says, serving, user


async def groups(server: Server, filter: dict[str, Any] | None = None, limit: int = 50) -> list[dict[str, Any]]:
    """The groups of all pages."""
    found: list[dict[str, Any]] = []
    params = {"filter": json.dumps(filter or {}), "limit": str(limit)}
    while True:
        answer = await server.http.get("/rl/groups", params=params)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found += page["groups"]
        if page["cursor"] is None:
            return found
        params["cursor"] = page["cursor"]


async def recorded(server: Server) -> None:
    """`g0` with scores 1, 0 and 0.5 and a session without one, `g1` without a turn, and a session of no group."""
    for name, group, reward in (
        ("a", "g0", 1),
        ("b", "g0", 0),
        ("alone", None, 9),
        ("c", "g1", None),
        ("d", "g0", 0.5),
        ("e", "g0", None),
    ):
        start = {"session_id": name, "task_id": f"task {name}", "group_id": group, "discount": 0.5}
        await server.ok("/rl/start_session", start)
        if reward is not None:
            await server.chat([user("hi")], name)
            await server.ok(f"/{name}/rl/end_session", {"reward": reward})


ANSWERS = ("one", "two", "three", "four")


async def test_a_group_has_the_scores_of_its_sessions(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*ANSWERS), database_url=database_url) as server:
        await recorded(server)
        newest, oldest = await groups(server)
        assert (newest["group_id"], oldest["group_id"]) == ("g1", "g0")
        assert oldest["by_status"] == {"active": 1, "ended": 3, "expired": 0}
        assert (oldest["sessions"], oldest["counted"], oldest["rewarded"], oldest["turns"]) == (4, 4, 3, 3)
        assert oldest["scores"] == [1, 0, 0.5]
        assert (oldest["mean"], oldest["std"]) == (mean([1, 0, 0.5]), pytest.approx(stdev([1, 0, 0.5])))
        assert oldest["task_ids"] == ["task a", "task b", "task d", "task e"]
        assert (newest["scores"], newest["mean"], newest["std"], newest["versions"]) == ([], None, None, None)
        entries = (await server.http.get("/rl/sessions", params={"filter": '{"group_id": "g0"}'})).json()["sessions"]
        assert oldest["created_at"] == min(entry["created_at"] for entry in entries)


async def test_pages_of_groups_join_to_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, says(*ANSWERS)) as server:
        await recorded(server)
        whole = await groups(server)
        assert await groups(server, limit=1) == whole
        monkeypatch.setattr(listing, "_MOST_TURNS", 1)
        monkeypatch.setattr(listing, "_PIECE_TURNS", 1)
        assert await groups(server) == whole


async def test_a_cursor_of_groups_goes_on_after_the_last_of_its_page(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(), database_url=database_url) as server:
        for number in range(5):
            await server.ok("/rl/start_session", {"session_id": f"s{number}", "group_id": f"g{number}"})
        found = await groups(server, limit=2)
        assert [group["group_id"] for group in found] == ["g4", "g3", "g2", "g1", "g0"]
        await server.ok("/rl/start_session", {"session_id": "late", "group_id": "g0"})
        last = (await groups(server))[-1]
        assert (last["group_id"], last["sessions"]) == ("g0", 2)


async def test_a_large_group_is_judged_by_its_first_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "_PER_GROUP", 2)
    async with serving(tmp_path, says(*ANSWERS)) as server:
        await recorded(server)
        (group,) = await groups(server, {"group_id": "g0"})
        assert (group["sessions"], group["counted"], group["scores"]) == (4, 2, [1, 0])


async def test_a_group_of_a_filter_has_only_the_sessions_that_it_selects(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*ANSWERS), database_url=database_url) as server:
        await recorded(server)
        (ended,) = await groups(server, {"status": "ended"})
        assert (ended["group_id"], ended["sessions"], ended["scores"]) == ("g0", 3, [1, 0, 0.5])
        assert [group["group_id"] for group in await groups(server, {"search": "TASK C"})] == ["g1"]
        assert await groups(server, {"group_id": "no such"}) == []


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"cursor": "g0"}, "cursor"),
        ({"limit": "201"}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"order": "oldest"}, "order"),
        ({"filter": '{"reward": 1}'}, "filter.reward"),
        ({"filter": '{"metadata": {"env": 1}}'}, "filter.metadata"),
        ({"filter": '{"groups": 1}'}, "filter.groups"),
    ],
)
async def test_errors_of_a_listing_of_groups_name_the_field(tmp_path: Path, params: dict[str, str], param: str) -> None:
    async with serving(tmp_path, says()) as server:
        refused = await server.http.get("/rl/groups", params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


async def test_only_the_admin_key_lists_groups(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key="secret") as server:
        assert (await server.http.get("/rl/groups")).status_code == 401
        assert (await server.http.get("/rl/groups", headers={"authorization": "Bearer secret"})).status_code == 200
