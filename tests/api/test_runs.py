"""`GET /rl/runs`: figures of sessions by training run and step, which add up over pages."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support import says, serving, user
from tokengrove.client import AsyncClient


@pytest.mark.parametrize("limit", [1, 3, 1000])
async def test_pages_add_up_to_the_figures_of_all_sessions(tmp_path: Path, limit: int) -> None:
    rng = random.Random(7)
    known: dict[Any, list[Any]] = defaultdict(list)
    async with serving(tmp_path, says(*["one"] * 200)) as server, AsyncClient(app=server.app) as client:
        for at in range(40):
            run, step = rng.choice(["a", "b"]), rng.randrange(3)
            metadata = {"experiment": run, "step": step, "validate": at % 10 == 9}
            await server.ok("/rl/start_session", {"session_id": f"s{at}", "task_id": "t", "metadata": metadata})
            for _ in range(rng.randint(1, 2)):
                await server.chat([user("a")], f"s{at}")  # the second is sampled again: a fork
            score = rng.choice([None, 0.0, 0.25, 1.0])
            await server.ok(f"/s{at}/rl/end_session", {} if score is None else {"reward": score})
            tree = await server.tree(f"s{at}")
            kl = None
            if at % 3 == 0:
                samples = (await client.export(session_id=f"s{at}", layout="individual")).samples
                await client.annotate(samples, step, {"logprobs": [each.logprobs - 0.5 for each in samples]})
                kl = math.expm1(-0.5) + 0.5
            if not metadata["validate"]:
                known[run, step].append((f"s{at}", tree, score, kl))
        merged: dict[Any, int] = defaultdict(int)
        cursor = None
        while True:
            query: dict[str, Any] = {"limit": limit} | ({"cursor": cursor} if cursor else {})
            page = (await server.http.get("/rl/runs", params=query)).json()
            for entry in page["runs"]:
                merged[entry["run"], entry["step"]] += entry["sessions"]
            cursor = page["cursor"]
            if cursor is None:
                break
        figures = await client.runs()
    assert [(each["run"], each["step"]) for each in figures] == sorted(known)
    assert merged == {key: len(sessions) for key, sessions in known.items()}
    for each in figures:
        sessions = known[each["run"], each["step"]]
        scores = [score for _, _, score, _ in sessions if score is not None]
        turns = [turn for _, tree, _, _ in sessions for turn in tree]
        assert (each["sessions"], each["ended"], each["rewarded"]) == (len(sessions), len(sessions), len(scores))
        assert each["mean_score"] == (pytest.approx(statistics.mean(scores)) if scores else None)
        assert each["std_score"] == (pytest.approx(statistics.stdev(scores)) if len(scores) > 1 else None)
        assert each["mean_turns"] == pytest.approx(len(turns) / len(sessions))
        assert each["mean_output_tokens"] == pytest.approx(sum(turn["output_tokens"] for turn in turns) / len(sessions))
        assert each["forks"] == sum(turn["reason"] not in ("first", "continued", "new_root") for turn in turns)
        told = any(kl is not None for *_, kl in sessions)
        assert each["kl"] == (pytest.approx(math.expm1(-0.5) + 0.5, rel=1e-5) if told else None)
        assert each["largest_ratio"] == (pytest.approx(math.exp(0.5), rel=1e-5) if told else None)
        worst = sorted((score, name) for name, _, score, _ in sessions if score is not None)[:10]
        assert [(one["score"], one["session_id"]) for one in each["worst"]] == worst


async def test_the_ten_lowest_scores_of_a_page_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["one"] * 14)) as server:
        for at in range(14):
            await server.chat([user("a")], f"s{at:02}")
            await server.ok(f"/s{at:02}/rl/end_session", {"reward": (at * 5 % 14) / 14})
        (entry,) = (await server.http.get("/rl/runs")).json()["runs"]
        lowest = sorted(((at * 5 % 14) / 14, f"s{at:02}") for at in range(14))[:10]
        assert [(each["score"], each["session_id"]) for each in entry["worst"]] == lowest


async def test_other_keys_of_metadata_and_a_filter_select(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server, AsyncClient(app=server.app) as client:
        for at, metadata in enumerate(({"project": "p", "epoch": 2}, {"project": "q", "epoch": [1]}, {})):
            await server.ok("/rl/start_session", {"session_id": f"s{at}", "task_id": "t", "metadata": metadata})
            await server.chat([user("a")], f"s{at}")
        found = await client.runs(run="project", step="epoch")
        assert [(each["run"], each["step"]) for each in found] == [("p", 2), ("q", None), (None, None)]
        (one,) = await client.runs({"metadata": {"project": "p"}}, run="project", step="epoch")
        assert (one["sessions"], one["ended"], one["mean_score"], one["worst"]) == (1, 0, None, [])
        for query in ("run=", "step=" + "x" * 201, "runs=a", "limit=0", "filter=[]", "cursor=nobody"):
            assert (await server.http.get(f"/rl/runs?{query}")).status_code == 400, query


async def test_withdrawn_sessions_do_not_count_and_failures_do(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server, AsyncClient(app=server.app) as client:
        await server.chat([user("a")], "s")
        assert (await server.post("/s/v1/chat/completions", {"messages": [user("b")]})).status_code >= 500
        ((one),) = await client.runs()
        assert (one["sessions"], one["failed"], one["mean_turns"]) == (1, 1, 1.0)
        await server.ok("/s/rl/withdraw_session", {})
        assert await client.runs() == []
