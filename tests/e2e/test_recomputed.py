"""Exports follow from the raw tables, and the raw tables hold what the engine sampled. Independent code checks both."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest

from proxy.app import build_app
from proxy.engine.scripted.scripts import Reply, Script, play
from proxy.settings import Settings
from tests import raw_tables
from tests.exports import areal_tensor, entries, read
from tests.raw_tables import Fates, Groups, Stored
from tests.support import Server, sampled, tiny_renderer, until, user
from tests.wandering import AGENTS, VariedEngine, varied, wander

SEEDS = range(4)
FORMATS = ("json", "jsonl", "npz", "safetensors", "arrow", "parquet")
PADDED = {"layout": "padded", "prompt_length": 60, "response_length": 48}
EXPORTS: list[dict[str, Any]] = [
    {},
    {"discount": 0.7, "credit": "linear", "train": {"turns": "last"}, "step_advantages": "grpo"},
    {"layout": "individual", "filter": {"agent": "red"}, "mask_unfinished": True, "advantages": "grpo"},
    {"layout": "concat", "advantages": "grpo", "step_advantages": "leave_one_out"},
    {"layout": "concat", "discount": 0.0, "credit": "tree", "train": {"turns": [0, 2]}, "reward_name": "pass_rate"},
    {"layout": "concat", "filter": {"agent": list(AGENTS[:1])}, "reward_granularity": "binary", "advantages": "grpo"},
    {"layout": "concat", "filter": {"purpose": ["main", "aux"]}, "train": {"purposes": ["main"]}},
    {"layout": "concat", "filter": {"group_id": "g1"}, "advantages": "leave_one_out", "step_advantages": "grpo"},
    {"layout": "concat", "reward_scope": "path"},
    {"layout": "concat", "reward_scope": "path", "advantages": "grpo", "train": {"purposes": ["main", "aux"]}},
    {"layout": "concat", "reward_scope": "path", "unrewarded": "skip", "filter": {"agent": "red"}},
    {"layout": "concat", "unrewarded": "zero", "advantages": "grpo", "step_advantages": "grpo"},
    {"layout": "individual", "reward_scope": "path", "advantages": "leave_one_out", "step_advantages": "grpo"},
    {"layout": "concat", "reward_scope": "agent", "advantages": "grpo", "unrewarded": "zero"},
    {"layout": "individual", "reward_scope": "agent", "advantages": "leave_one_out", "train": {"turns": "last"}},
    {"layout": "concat", "reward_scope": "agent", "step_advantages": "leave_one_out", "unrewarded": "skip"},
    {"layout": "tree", "reward_scope": "agent", "advantages": "grpo", "filter": {"purpose": ["main", "aux"]}},
    {**PADDED, "on_too_long": "drop", "reward_scope": "agent", "advantages": "grpo", "train": {"agents": ["red"]}},
    {"layout": "tree", "reward_scope": "path", "advantages": "leave_one_out", "unrewarded": "zero"},
    {"layout": "tree", "discount": 1.0, "reward_granularity": "pass_rate", "step_advantages": "grpo"},
    {"layout": "tree", "filter": {"agent": "blue"}, "train": {"agents": ["blue"]}, "advantages": "grpo"},
    {**PADDED, "on_too_long": "drop", "advantages": "leave_one_out", "pad_token_id": 3},
    {**PADDED, "on_too_long": "truncate", "keep": "head", "train": {"turns": "last"}, "advantages": "grpo"},
    {**PADDED, "on_too_long": "truncate", "keep": "middle", "reward_name": "style"},
    {**PADDED, "on_too_long": "truncate", "keep": "tail", "mask_unfinished": True, "step_advantages": "grpo"},
    {"train": {"constrained": True}, "filter": {"min_version": 1}},
    {"layout": "individual", "train": {"constrained": True}, "filter": {"min_version": 1, "max_version_span": 1}},
    {"layout": "tree", "train": {"constrained": True}, "filter": {"min_version": 2}},
    {"layout": "tree", "filter": {"max_version_span": 1, "agent": "red"}, "train": {"turns": [0, 1, 3]}},
    {**PADDED, "on_too_long": "truncate", "keep": "tail", "filter": {"min_version": 1}},
    {**PADDED, "on_too_long": "truncate", "keep": "middle", "filter": {"max_version_span": 1}},
    {**PADDED, "on_too_long": "drop", "train": {"constrained": True}, "filter": {"min_version": 1}},
    {**PADDED, "response_length": 20, "on_too_long": "truncate", "keep": "tail", "train": {"constrained": True}},
    {**PADDED, "response_length": 20, "on_too_long": "truncate", "keep": "middle"},
    {"train": {"logprobs": "rule"}, "advantages": "grpo"},
    {"layout": "individual", "train": {"logprobs": "rule", "constrained": True}},
    {"layout": "tree", "train": {"logprobs": "rule"}, "filter": {"min_version": 1}},
    {**PADDED, "on_too_long": "truncate", "keep": "tail", "train": {"logprobs": "rule"}},
    {"stale": "mask", "filter": {"min_version": 1}, "advantages": "grpo", "step_advantages": "grpo"},
    {"layout": "individual", "stale": "mask", "filter": {"min_version": 2}, "train": {"constrained": True}},
    {"layout": "tree", "stale": "mask", "filter": {"min_version": 2, "max_version_span": 1}},
    {**PADDED, "on_too_long": "truncate", "keep": "tail", "stale": "mask", "filter": {"min_version": 1}},
    {**PADDED, "on_too_long": "drop", "stale": "mask", "filter": {"min_version": 1, "max_version_span": 0}},
]


@contextlib.asynccontextmanager
async def on_file(folder: Path, script: Script, restless: Random | None = None, **settings: Any) -> AsyncIterator[Any]:
    """Run a server on a SQLite file, with an engine that keeps its prompts and outputs."""
    configured = Settings(database_url=f"sqlite:///{folder / 'raw.db'}", **settings)
    renderer = tiny_renderer(configured.thinking_retention)
    engine = VariedEngine(script, vocab_size=renderer.vocab_size, restless=restless)
    app = build_app(configured, engine=engine, renderer=renderer)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        yield Server(app, http, engine), engine


async def export(server: Server, name: str, body: dict[str, Any]) -> bytes:
    response = await server.post("/export_trajectories", {**body, "format": name})
    assert response.status_code == 200, response.text
    return response.content


def matched(sessions: list[Stored], body: dict[str, Any]) -> list[Stored]:
    group = body.get("filter", {}).get("group_id")
    return [stored for stored in sessions if group is None or stored.group == group]


def recomputed(sessions: list[Stored], body: dict[str, Any]) -> list[raw_tables.Row]:
    chosen = matched(sessions, body)
    groups = Groups(chosen, body)
    return [{"session_id": s.session_id, **row} for s in chosen for row in raw_tables.samples(s, body, groups)]


def check_rows(found: list[Any], wanted: list[raw_tables.Row], *, always_token_rewards: bool) -> None:
    assert [row["interaction_ids"] for row in found] == [row["interaction_ids"] for row in wanted]
    for ours, theirs in zip(wanted, found, strict=True):
        check_turns(theirs["turns"], ours["turns"])
        assert theirs["session_id"] == ours["session_id"]
        if not always_token_rewards:
            assert ("token_rewards" in theirs) == ("token_rewards" in ours)
        for name, values in ours.items():
            if name == "score":
                assert theirs[name] == (None if values is None else pytest.approx(values))
            elif name in ("rewarded", "reward_scope", "logprobs_of"):
                assert theirs[name] == values
            elif name not in ("interaction_ids", "turns", "session_id"):
                check_column(name, theirs[name], values)


def check_turns(found: list[Any], wanted: list[Any]) -> None:
    for ours, theirs in zip(wanted, found, strict=True):
        for name in ("interaction_id", "reward", "span", "recomputable", "logprobs_of"):
            assert theirs[name] == ours[name], name
        np.testing.assert_allclose(theirs["return"], ours["return"], rtol=1e-12, atol=1e-12)


def check_column(name: str, found: Any, wanted: Any) -> None:
    """Compare integers, masks and logprobs bit for bit, and sums of floats within the rounding of float32."""
    wanted = np.asarray(wanted)
    if name in ("advantages", "step_advantages"):
        # Where all rewards are equal, rounding errors of about 1e-16 are divided by the formula's 1e-6.
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=name)
    elif wanted.dtype.kind == "f" and name not in ("logprobs", "rollout_log_probs", "token_rewards"):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted.astype(np.float32) if wanted.dtype.kind == "f" else wanted, name)


def check_sums(sessions: list[Stored], body: dict[str, Any], found: list[Any]) -> None:
    """Check that layouts which join turns train each trainable token once, with its stored weight version."""
    if body.get("layout", "concat") not in ("concat", "tree") or {"min_version", "max_version_span"} & set(
        body.get("filter", {})
    ):
        return
    wanted, versions = 0, 0
    for stored in matched(sessions, body):
        scores = raw_tables.Scores(stored, body)
        for node in [] if scores.left_out else scores.kept:
            paths = [scores.of([], end) for end in scores.ends([node.id])]
            if body.get("layout") != "tree" and scores.skips and not any(score is not None for score in paths):
                continue  # its paths are left out; a tree is left out as a whole
            allowed = raw_tables.may_train(stored, node, body)
            wanted += int(allowed.sum())
            versions += int(node.versions[allowed].sum())
    assert sum(sum(row["loss_mask"]) for row in found) == wanted
    assert sum(v for row in found for v, m in zip(row["versions"], row["loss_mask"], strict=True) if m) == versions
    weights: Counter[str] = Counter()
    for row in found:
        weights[row["session_id"]] += row["weight"][0]
    assert all(total == pytest.approx(1) or total == 0 for total in weights.values())


def check_areal(body: Any, wanted: list[raw_tables.Row]) -> None:
    assert list(body["interactions"]) == [row["interaction_ids"][-1] for row in wanted]
    for row in wanted:
        found = body["interactions"][row["interaction_ids"][-1]]
        tensors = {name: areal_tensor(value)[0] for name, value in found["tensor_dict"].items()}
        for name in ("input_ids", "loss_mask", "versions", "logprobs", "attention_mask"):
            check_column(name, tensors[name], row[name])
        assert found["reward"] == pytest.approx(row["rewards"][0], rel=1e-6, abs=1e-6)


def check_engine(sessions: list[Stored], engine: VariedEngine) -> None:
    """Check that every complete row equals one request and reply of the engine."""
    said = Counter(
        (tuple(s.prompt), tuple(s.output), tuple(s.logprobs), tuple(s.versions), raw_tables.furthest(s.logprobs_of))
        for s in engine.said
    )
    for stored in sessions:
        for node in stored.nodes.values():
            prompt = raw_tables.tokens(stored, node).ids[: -len(node.output)]
            arrays = [tuple(each.tolist()) for each in (prompt, node.output, node.logprobs, node.versions)]
            row = (*arrays, node.logprobs_of)
            assert said[row] > 0
            said[row] -= 1


def check_persisted(stored: Stored) -> None:
    """Check the stored returns: by the session's discount and credit once it has ended, and none before."""
    values = raw_tables.returns(stored, {}) if stored.status == "ended" else {}
    assert stored.returns == {
        (name, stored.discount, stored.credit): pytest.approx(value, rel=1e-12, abs=1e-12)
        for name, value in values.items()
    }


@pytest.mark.parametrize("seed", SEEDS)
async def test_exports_equal_the_recomputation_from_the_raw_tables(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    retention, script = "template" if seed % 4 == 2 else "all", varied(random, thinks=True)
    async with on_file(tmp_path, script, random, thinking_retention=retention) as (server, engine):
        await wander(server, random, 6)
        asked = [(body, name) for body in EXPORTS for name in random.sample(FORMATS, 2)]
        answers = [(body, name, await export(server, name, body)) for body, name in asked]
        areal = [(style, await export(server, "areal", {"style": style})) for style in ("individual", "concat")]
    sessions = raw_tables.read_sessions(tmp_path / "raw.db")
    assert sum(len(stored.nodes) for stored in sessions) > 15
    check_engine(sessions, engine)
    for stored in sessions:
        check_persisted(stored)
    for body, name, content in answers:
        found, wanted = read(name, content), recomputed(sessions, body)
        check_rows(found["samples"], wanted, always_token_rewards=body.get("layout") == "padded")
        check_sums(sessions, body, found["samples"])
        for stored in matched(sessions, body):
            groups, fates = Groups(matched(sessions, body), body), Fates()
            raw_tables.samples(stored, body, fates=fates)
            said, entry = entries(found)[stored.session_id], raw_tables.entry(stored, body, groups)
            entry |= fates.counts(stored, body)
            assert {key: said[key] for key in entry} == entry
            lost = sum(
                map(said["untrained_tokens"].get, ("drift", "too_long", "cut", "no_logprobs", "grammar"), [0] * 5)
            )
            alone = entry.get("group_members") == 1 and entry["left_out"] is None
            mixed = groups.mixed(stored) and entry["left_out"] is None
            told = (2 * lost > said["sampled_tokens"], alone, mixed, raw_tables.Scores(stored, body).warns)
            told += (
                any(fates.trains(stored, node, body) for node in stored.nodes.values() if node.logprobs_of != "rule"),
            )
            assert len(said["warnings"]) == sum(told), (said["warnings"], told)
    for style, content in areal:
        check_areal(json.loads(content), recomputed(sessions, {"layout": style, "reward_scope": "path"}))


@pytest.mark.parametrize("seed", SEEDS)
async def test_drift_mask_trains_each_output_that_stands_as_sampled_once_and_counts_the_rest(
    tmp_path: Path, seed: int
) -> None:
    random = Random(seed)
    async with on_file(tmp_path, varied(random, thinks=True), random, thinking_retention="template") as (server, _):
        await wander(server, random, 4)
        found = await server.ok("/export_trajectories", {"layout": "concat", "drift": "mask"})
    sessions = {stored.session_id: stored for stored in raw_tables.read_sessions(tmp_path / "raw.db")}
    assert any(node.parent and not node.aligned for stored in sessions.values() for node in stored.nodes.values())
    for name, stored in sessions.items():
        rows = [row for row in found["samples"] if row["session_id"] == name]
        placed = [check_mask(stored, row) for row in rows]
        trained = [each for _, ids in placed for each in ids]
        assert len(trained) == len(set(trained))
        standing = {each for ids, _ in placed for each in ids}
        lost = sum(len(node.output) for node in stored.nodes.values() if node.id not in standing)
        assert entries(found)[name]["masked_tokens"] == lost
        away = [node for node in stored.nodes.values() if node.id not in standing]
        drifted = sum(int(raw_tables.may_train(stored, node, {}).sum()) for node in away)
        assert entries(found)[name]["untrained_tokens"].get("drift", 0) == drifted


def check_mask(stored: Stored, row: Any) -> tuple[list[str], list[str]]:
    """Check a sample. Return the ids of its turns that stand as sampled, and of the turns that it trains."""
    ids, mask = row["input_ids"], np.array(row["loss_mask"], bool)
    assert ids == raw_tables.tokens(stored, stored.nodes[row["interaction_id"]]).ids.tolist()
    standing, trained, sampled_here = [], [], np.zeros(len(ids), bool)
    for number, turn in enumerate(row["turns"]):
        if turn["span"] is None:
            assert turn["recomputable"] == "drift"
            continue
        where, node = slice(*turn["span"]), stored.nodes[turn["interaction_id"]]
        assert ids[where] == node.output.tolist()
        assert not sampled_here[where].any()
        sampled_here[where] = True
        standing.append(node.id)
        before = raw_tables.tokens(stored, node).ids[: -len(node.output)].tolist()
        expected = "drift" if ids[: where.start] != before else raw_tables.not_recomputable(node, context_cut=False)
        assert turn["recomputable"] == expected
        if mask[where].any():
            trained.append(node.id)
            np.testing.assert_array_equal(mask[where], raw_tables.may_train(stored, node, {}))
            for name, values in (("logprobs", node.logprobs), ("versions", node.versions)):
                found = np.array(row[name], values.dtype)[where]
                np.testing.assert_array_equal(found[mask[where]], values[mask[where]])
            assert set(np.array(row["turn_ids"])[where][mask[where]]) == {number}
    assert not mask[~sampled_here].any()
    return standing, trained


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_weight_update_in_mid_reply_is_stored_and_exported_at_its_token(tmp_path: Path, mode: str) -> None:
    """Computed by hand: the reply has 30 tokens, and the tokens after the update have version 7."""
    whole = sampled("alpha " * 29)
    pieces = [Reply(whole, delay_s=0.02)]
    if mode == "abort":  # the remainder is a second request
        pieces.append(Reply(sampled("omega"), delay_s=0.02))
    async with on_file(tmp_path, play([*pieces, Reply(sampled("later"))])) as (server, engine):
        asking = asyncio.create_task(server.chat([user("q")]))
        await until(lambda: bool(engine.said) and len(engine.said[0].output) >= 5)
        await server.ok("/engine/update_weights", {"path": "w", "version": 7, "mode": mode})
        message = (await asking)["choices"][0]["message"]
        await server.chat([user("q"), message, user("more")])
        await server.ok("/s/rl/set_reward", {"reward": 2.0})
        await server.ok("/s/rl/end_session", {})
        single = await server.export(layout="individual", discount=0.5)
        (joined,) = await server.export(layout="concat")
    (stored,) = raw_tables.read_sessions(tmp_path / "raw.db")
    first, second = stored.nodes.values()
    before = first.versions.tolist().index(7)
    assert 5 <= before < len(first.output)
    assert first.versions.tolist() == [0] * before + [7] * (len(first.output) - before)
    rest = sampled("omega").tolist() if mode == "abort" else whole.tolist()[before:]
    assert first.output.tolist() == whole.tolist()[:before] + rest
    assert [logprob for said in engine.said[:-1] for logprob in said.logprobs] == first.logprobs.tolist()
    assert [sample["rewards"] for sample in single] == [[1.0], [2.0]]
    assert (joined["rewards"], joined["raw_rewards"]) == ([2.0], [2.0])
    versions = [v for v, trained in zip(joined["versions"], joined["loss_mask"], strict=True) if trained]
    assert versions == [*first.versions.tolist(), *second.versions.tolist()]
    assert set(second.versions.tolist()) == {7}
    assert sum(joined["loss_mask"]) == len(first.output) + len(second.output)
