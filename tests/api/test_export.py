"""An export reads what is stored, changes nothing, and pages through sessions without splitting or losing one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from tests.exports import entries
from tests.support import Server, sampled, says, serving, user
from tests.wide import CROSSED


def always() -> Script:
    reply = Reply(sampled("ok"), chunk=64)
    return lambda request: reply


async def chain(server: Server, session: str = "s", turns: int = 2) -> list[str]:
    messages: list[Any] = []
    ids = []
    for number in range(turns):
        messages.append(user(f"question {number}"))
        reply = await server.chat(messages, session)
        ids.append(reply["id"])
        messages.append(reply["choices"][0]["message"])
    return ids


async def export(server: Server, **body: Any) -> Any:
    return await server.ok("/export_trajectories", body)


@pytest.mark.parametrize(
    ("layout", "samples"),
    [("individual", 2), ("step", 2), ("concat", 1), ("traj", 1), (None, 1)],
)
async def test_each_layout_and_alias(tmp_path: Path, layout: str | None, samples: int) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server)
        body = await export(server, session_id="s", layout=layout)
        assert len(body["samples"]) == samples
        assert await export(server, session_id="s", layout=layout, format="json") == body


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"layout": "spiral"}, "layout", "individual"),
    ({"layout": 5}, "layout", "concat"),
    ({"layout": ["concat"]}, "layout", "concat"),
    ({"format": "csv"}, "format", "json"),
    ({"format": {}}, "format", "json"),
    ({"style": "spiral"}, "style", "concat"),
    ({"credit": "flat"}, "credit", "linear"),
    ({"credit": []}, "credit", "tree"),
    ({"discount": 2}, "discount", "between"),
    ({"discount": "1"}, "discount", "number"),
    ({"discount": False}, "discount", "number"),
    ({"session_id": 5}, "session_id", "string"),
    ({"session_id": "a\0"}, "session_id", "NUL"),
    ({"session_ids": "s"}, "session_ids", "array"),
    ({"session_ids": [5]}, "session_ids[0]", "string"),
    ({"session_ids": ["s"], "session_id": "s"}, "session_ids", "not both"),
    ({"discont": 0.9}, "discont", "discount"),
    ({"group_id": "g"}, "group_id", "inside 'filter'"),
    ({"lease_s": 5}, "lease_s", "is unknown; this endpoint accepts"),
    ({"filter": []}, "filter", "object"),
    ({"filter": 0}, "filter", "object"),
    ({"filter": {"weights": 3}}, "filter.weights", "min_version"),
    ({"filter": {"group_id": 0}}, "filter.group_id", "string"),
    ({"filter": {"task_id": []}}, "filter.task_id", "string"),
    ({"filter": {"status": "done"}}, "filter.status", "ended"),
    ({"filter": {"status": {}}}, "filter.status", "ended"),
    ({"filter": {"outcome": "finished"}}, "filter.outcome", "Finished"),
    ({"filter": {"since": "yesterday"}}, "filter.since", "seconds"),
    ({"filter": {"since": True}}, "filter.since", "seconds"),
    ({"group_id": "g"}, "group_id", "inside 'filter'"),
    ({"session_id": "s", "min_version": 0}, "min_version", "inside 'filter'"),
    ({"limit": 0}, "limit", "between"),
    ({"limit": "5"}, "limit", "integer"),
    ({"limit": 1.5}, "limit", "integer"),
    ({"limit": 100_000}, "limit", "between"),
    ({"cursor": 5}, "cursor", "string"),
    ({"cursor": "nobody"}, "cursor", "cursor"),
    ({"wait_s": -1, "session_id": "s"}, "wait_s", "between"),
    ({"wait_s": "5"}, "wait_s", "number"),
    ({"wait_s": 5}, "wait_s", "session_id"),
    ({"train": {"turns": "first"}}, "train.turns", "last"),
    ({"include": ["tokens"]}, "include", "text"),
]


async def test_a_bad_export_is_400_and_names_the_field_and_the_choices(tmp_path: Path) -> None:
    wrong = []
    async with serving(tmp_path, always()) as server:
        await chain(server, turns=1)
        for body, param, says_so in BAD:
            response = await server.post("/export_trajectories", body)
            error = response.json().get("error", {})
            if (response.status_code, error.get("param")) != (400, param) or says_so not in error["message"]:
                wrong.append((body, response.text[:500]))
    assert not wrong, wrong


async def test_json_fields_have_the_documented_types_and_lengths(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one two", "three")) as server:
        body = {"task_id": "t", "session_id": "s", "group_id": "g", "discount": 0.5}
        await server.ok("/rl/start_session", body)
        first = await server.answer([user("a")], temperature=0.5)
        second = [user("a"), first, user("b")]
        headers = {"x-tokengrove-state-hash": "h1", "x-tokengrove-purpose": "main"}
        path = "/s/v1/chat/completions"
        await server.ok(path, {"model": "m", "messages": second, "max_tokens": 50}, headers=headers)
        await server.ok("/s/rl/set_reward", {"reward": 1})
        (sample,) = await server.export()
        length = len(sample["input_ids"])
        for name, kind in (("input_ids", int), ("loss_mask", int), ("versions", int), ("turn_ids", int)):
            assert len(sample[name]) == length and all(type(item) is kind for item in sample[name]), name
        assert len(sample["logprobs"]) == length and all(type(item) is float for item in sample["logprobs"])
        assert sample["attention_mask"] == [True] * length
        for at, mask in enumerate(sample["loss_mask"]):
            assert mask in (0, 1)
            assert (sample["versions"][at], sample["turn_ids"][at]) != (-1, -1) if mask else True
            if not mask:
                assert (sample["versions"][at], sample["turn_ids"][at], sample["logprobs"][at]) == (-1, -1, 0.0)
        assert (sample["rewards"], sample["raw_rewards"]) == ([1.0], [1.0])
        tree = await server.tree()
        ids = [node["id"] for node in tree]
        assert (sample["interaction_id"], sample["interaction_ids"]) == (ids[-1], ids)
        assert (sample["session_id"], sample["group_id"], sample["task_id"]) == ("s", "g", "t")
        assert (sample["purpose"], sample["finish_reason"], sample["recomputable"]) == ("main", "stop", None)
        assert sample["sampling"]["temperature"] == 1.0
        assert [turn["interaction_id"] for turn in sample["turns"]] == ids
        assert [turn["reward"] for turn in sample["turns"]] == [None, 1.0]
        assert [turn["return"] for turn in sample["turns"]] == [0.5, 1.0]
        assert [turn["state_hash"] for turn in sample["turns"]][1] == "h1"
        for turn, text in zip(sample["turns"], ("one two", "three"), strict=True):
            begin, end = turn["span"]
            assert sample["input_ids"][begin:end] == list(sampled(text))
        individual = await server.export(layout="individual")
        assert [part["rewards"] for part in individual] == [[0.5], [1.0]]
        assert [part["raw_rewards"] for part in individual] == [[0.0], [1.0]]


async def test_an_export_with_another_discount_changes_no_stored_return(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), discount=0.9) as server:
        await chain(server, turns=3)
        await server.ok("/s/rl/end_session", {"reward": 1})
        before = await server.tree()
        for discount, expected in ((0.5, [0.25, 0.5, 1.0]), (0, [0.0, 0.0, 1.0]), (1, [1.0, 1.0, 1.0])):
            samples = await server.export(layout="individual", discount=discount)
            assert [sample["rewards"][0] for sample in samples] == expected
        assert await server.tree() == before
        samples = await server.export(layout="individual")
        assert [sample["rewards"][0] for sample in samples] == pytest.approx([0.81, 0.9, 1.0])


async def test_linear_credit_follows_the_order_of_completion(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for name in "abc":
            await server.chat([user(name)])
        await server.ok("/s/rl/set_reward", {"reward": 1})
        tree = await server.export(layout="individual", discount=0.5)
        linear = await server.export(layout="individual", discount=0.5, credit="linear")
        assert [sample["rewards"][0] for sample in tree] == [0.0, 0.0, 1.0]
        assert [sample["rewards"][0] for sample in linear] == [0.25, 0.5, 1.0]


async def test_an_empty_session_and_an_empty_server_have_no_samples(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        assert await export(server) == {"samples": [], "sessions": [], "cursor": None}
        await server.ok("/rl/start_session", {"session_id": "s"})
        body = await export(server, session_id="s")
        assert body["samples"] == [] and body["cursor"] is None
        entry = entries(body)["s"]
        assert (entry["complete"], entry["rewarded"], entry["reasons"]) == (True, False, {})
        assert await export(server, session_ids=[]) == {"samples": [], "sessions": [], "cursor": None}


@pytest.mark.parametrize("body", [{"session_id": "x"}, {"session_ids": ["s", "x"]}, {"session_id": "x", "wait_s": 5}])
async def test_an_unknown_session_is_404(tmp_path: Path, body: dict[str, Any]) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server, turns=1)
        response = await server.post("/export_trajectories", body)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")


async def test_failed_turns_are_counted_and_never_exported(tmp_path: Path) -> None:
    script = play([Reply(sampled("a")), Reply(sampled("b"), fault=Fault.ERROR, fault_after=1)])
    async with serving(tmp_path, script) as server:
        await server.chat([user("a")])
        await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("b")]})
        body = await export(server, session_id="s")
        assert len(body["samples"]) == 1
        entry = entries(body)["s"]
        assert (entry["complete"], entry["failed"], entry["aborted"], entry["begun_not_ended"]) == (False, 1, 0, 0)
        assert entry["reasons"] == {"first": 1} and entry["unaligned"] == 0


async def test_filters_select_sessions(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for group in ("g1", "g2"):
            for task in ("t1", "t2"):
                session = f"{group}-{task}"
                start = {"session_id": session, "task_id": task, "group_id": group}
                await server.ok("/rl/start_session", start)
                await server.chat([user("hi")], session)
        await server.ok("/g1-t1/rl/end_session", {"outcome": "Finished"})
        await server.ok("/g2-t2/rl/end_session", {"outcome": "Failed"})
        ended_at = (await server.http.get("/rl/sessions/g1-t1")).json()["ended_at"]

        async def found(**filters: Any) -> list[str]:
            return list(entries(await export(server, filter=filters)))

        assert await found() == ["g1-t1", "g1-t2", "g2-t1", "g2-t2"]
        assert await found(group_id="g1") == ["g1-t1", "g1-t2"]
        assert await found(group_id="g1", task_id="t2") == ["g1-t2"]
        assert await found(group_id="") == []
        assert await found(status="ended") == ["g1-t1", "g2-t2"]
        assert await found(status="active", group_id="g2") == ["g2-t1"]
        assert await found(outcome="Failed") == ["g2-t2"]
        assert await found(since=ended_at + 0.000001) == ["g1-t2", "g2-t1", "g2-t2"]
        assert await found(group_id="none") == []


@CROSSED
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 1000])
@pytest.mark.parametrize("by_ids", [True, False])
async def test_pages_cover_every_session_once_and_never_split_one(tmp_path: Path, limit: int, by_ids: bool) -> None:
    names = [f"s{number}" for number in range(5)]
    async with serving(tmp_path, always()) as server:
        for number, name in enumerate(names):
            await chain(server, name, turns=number % 3 + 1)
        whole = await export(server)
        seen: list[str] = []
        samples: list[Any] = []
        cursor: str | None = None
        for _ in range(10):
            chosen = {"session_ids": names[::-1]} if by_ids else {}
            page = await export(server, limit=limit, cursor=cursor, **chosen)
            assert 1 <= len(entries(page)) <= limit
            assert {sample["session_id"] for sample in page["samples"]} == set(entries(page))
            seen += list(entries(page))
            samples += page["samples"]
            cursor = page["cursor"]
            if cursor is None:
                break
        assert seen == names
        assert samples == whole["samples"]


async def test_wait_s_ends_when_every_session_has_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for name in ("a", "b"):
            await chain(server, name, turns=1)
        waiting = asyncio.create_task(export(server, session_ids=["a", "b"], wait_s=600))
        await server.ok("/a/rl/end_session", {"reward": 3})
        assert not waiting.done()
        await server.ok("/b/rl/end_session", {})
        body = await asyncio.wait_for(waiting, 30)
        assert {name: entry["status"] for name, entry in entries(body).items()} == {"a": "ended", "b": "ended"}
        assert [sample["raw_rewards"] for sample in body["samples"]] == [[3.0], [0.0]]
        again = await asyncio.wait_for(export(server, session_ids=["a", "b"], wait_s=600), 30)
        assert again == body


async def test_wait_s_exports_the_stored_turns_at_the_deadline(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server, turns=1)
        body = await asyncio.wait_for(export(server, session_id="s", wait_s=0.01), 30)
        assert entries(body)["s"]["status"] == "active" and len(body["samples"]) == 1


async def test_a_turn_in_flight_is_counted_as_begun(tmp_path: Path) -> None:
    script = play([Reply(sampled("a")), Reply(sampled("b"), fault=Fault.HANG)])
    async with serving(tmp_path, script) as server:
        await server.chat([user("a")])
        body = {"model": "m", "messages": [user("b")]}
        turn = asyncio.create_task(server.post("/s/v1/chat/completions", body))
        while True:  # the record that a call began is written in the background
            entry = entries(await export(server, session_id="s"))["s"]
            if entry["begun_not_ended"]:
                break
        assert (entry["begun_not_ended"], entry["complete"]) == (1, False)
        await server.engine.abort(server.engine.requests[1].request_id)
        assert (await turn).status_code == 502


async def test_an_export_is_the_same_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server, turns=3)
        await server.ok("/s/rl/end_session", {"step_scores": [1, 2, 3]})
        before = [await export(server, session_id="s", layout=layout) for layout in ("individual", "concat")]
    async with serving(tmp_path, always()) as server:
        after = [await export(server, session_id="s", layout=layout) for layout in ("individual", "concat")]
        assert after == before


@pytest.mark.parametrize("version", [-1, 2**31])
async def test_a_version_beyond_int32_fails_its_turn_and_not_the_export(tmp_path: Path, version: int) -> None:
    replies = [Reply(sampled("ok")), Reply(sampled("ok"), version=version), Reply(sampled("ok"), version=2**31 - 1)]
    async with serving(tmp_path, play(replies)) as server:
        body = {"model": "m", "messages": [user("hi")]}
        statuses = [(await server.post("/s/v1/chat/completions", body)).status_code for _ in range(3)]
        assert statuses == [200, 502, 200]
        samples = await server.export()
        assert [max(sample["versions"]) for sample in samples] == [0, 2**31 - 1]
