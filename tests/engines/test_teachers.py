"""Teacher columns of exports: logprobs of forward passes in float32, computed once, of the version that is named."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.engine.gate import Gate
from proxy.engine.requests import GenerateRequest
from proxy.engine.tiny.model import build_tiny_model, builtin_model_folder
from proxy.store.archive.archiving import archive_old
from tests.adapters import adapter_logprobs
from tests.databases import execute
from tests.engines.test_served_scores import serving_models
from tests.support import Server, default_url, user
from tokengrove.client.readers.read import read
from tokengrove.rows_beside import missing_value

pytest.importorskip("torch")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.engines
TOLERANCE = 1e-4
REFERENCE = {"name": "ref", "model": "reference"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    build_tiny_model(folder, seed=5)
    return folder


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GenerateRequest]]:
    """The requests for scores that reached an engine."""
    found: list[GenerateRequest] = []
    sample = Gate.sample

    async def noted(gate: Gate, request: GenerateRequest, *more: Any) -> Any:
        if request.scored_from is not None:
            found.append(request)
        return await sample(gate, request, *more)

    monkeypatch.setattr(Gate, "sample", noted)
    yield found


async def play(server: Server, session: str, metadata: Mapping[str, Any] | None = None) -> None:
    """Two turns and a fork of the second."""
    started = {"task_id": session, "session_id": session, "metadata": dict(metadata or {})}
    await server.ok("/rl/start_session", started)
    path = f"/{session}/v1/chat/completions"
    asked = {"model": "policy", "max_tokens": 12, "messages": [user("Once")]}
    first = (await server.ok(path, asked))["choices"][0]["message"]
    for more in ("upon", "more"):
        await server.ok(path, {**asked, "messages": [user("Once"), first, user(more)]})
    await server.ok(f"/{session}/rl/end_session", {})


async def export(server: Server, **options: Any) -> Any:
    return await server.ok("/trajectories/export", {"teachers": [REFERENCE], **options})


def check(sample: Any, name: str, folder: Path, temperature: float = 1.0) -> None:
    """Assert that trained tokens have the logprobs of a forward pass, and the others none."""
    ids, mask, found = sample["input_ids"], sample["loss_mask"], sample[f"{name}_logprobs"]
    assert len(found) == len(ids) and sum(mask) > 0
    expected = [math.nan, *adapter_logprobs(folder, None, ids[:1], ids[1:], temperature)]
    for trained, told, right in zip(mask, found, expected, strict=True):
        assert (told == pytest.approx(right, abs=TOLERANCE)) if trained else told is None


@pytest.mark.parametrize("layout", ["concat", "individual"])
async def test_trained_tokens_have_the_logprobs_of_the_teacher(tmp_path: Path, reference: Path, layout: str) -> None:
    async with serving_models(tmp_path, reference) as server:
        await play(server, "s")
        teachers = [{**REFERENCE, "top_k": 3}, {"name": "own", "model": "policy", "temperature": 0.5}]
        found = await export(server, teachers=teachers, layout=layout)
        assert len(found["samples"]) == (2 if layout == "concat" else 3)
        for sample in found["samples"]:
            check(sample, "ref", reference)
            check(sample, "own", builtin_model_folder(), 0.5)
            rows = zip(sample["loss_mask"], sample["ref_top_token_ids"], sample["ref_top_logprobs"], strict=True)
            for index, (trained, ids, logprobs) in enumerate(rows):
                if not trained:
                    assert (ids, logprobs) == ([missing_value(np.dtype(np.uint32))] * 3, [None] * 3)
                    continue
                assert sorted(logprobs, reverse=True) == logprobs
                if sample["input_ids"][index] in ids:
                    at = ids.index(sample["input_ids"][index])
                    assert logprobs[at] == pytest.approx(sample["ref_logprobs"][index], abs=1e-6)
        (entry,) = found["sessions"]
        assert entry["teachers"]["ref"] == {"model": "reference", "version": 0, "temperature": 1.0}
        assert entry["teachers"]["own"] == {"model": "policy", "version": 0, "temperature": 0.5}
        turns = (await server.http.get("/rl/sessions/s")).json()["interactions"]
        assert len(turns) == 3, "scores make no turn"


async def test_a_policy_scores_its_own_tokens_as_it_sampled_them(tmp_path: Path, reference: Path) -> None:
    async with serving_models(tmp_path, reference) as server:
        await play(server, "s")
        found = await export(server, teachers=[{"model": "policy"}])
        for sample in found["samples"]:
            for trained, own, told in zip(
                sample["loss_mask"], sample["logprobs"], sample["teacher_logprobs"], strict=True
            ):
                assert (told == pytest.approx(own, abs=TOLERANCE)) if trained else told is None


async def test_scores_are_computed_once(tmp_path: Path, reference: Path, scored: list[GenerateRequest]) -> None:
    both = [REFERENCE, {"name": "own", "model": "policy"}]
    async with serving_models(tmp_path, reference) as server:
        await play(server, "s")
        first = await export(server, teachers=both)
        assert len(scored) == 6
        assert await export(server, teachers=both) == first and len(scored) == 6
        renamed = await export(server, teachers=[{**REFERENCE, "name": "other"}])
        assert [each["other_logprobs"] for each in renamed["samples"]] == [
            each["ref_logprobs"] for each in first["samples"]
        ]
        assert len(scored) == 6, "the name is no part of what was computed"
        await export(server, teachers=[{**REFERENCE, "temperature": 0.5}])
        assert len(scored) == 9
        assert [set(each) & {"ref_logprobs", "replay"} for each in (await export(server, teachers=[]))["samples"]] == [
            set(),
            set(),
        ], "an export that names no teacher has none"
    async with serving_models(tmp_path, reference) as server:
        again = await export(server, teachers=both)
        assert len(scored) == 12, "of the frozen model they are kept; versions of the policy may begin again"
        for before, after in zip(first["samples"], again["samples"], strict=True):
            assert after["ref_logprobs"] == before["ref_logprobs"]


async def test_new_weights_of_a_teacher_score_anew(tmp_path: Path, reference: Path) -> None:
    async with serving_models(tmp_path, reference) as server:
        await play(server, "s")
        before = await export(server, teachers=[{"model": "policy"}])
        await server.ok("/engine/update_weights", {"path": str(reference), "version": 7})
        after = await export(server, teachers=[{"model": "policy"}])
        assert [found["sessions"][0]["teachers"]["teacher"]["version"] for found in (before, after)] == [0, 7]
        for sample in before["samples"]:
            check(sample, "teacher", builtin_model_folder())
        for sample in after["samples"]:
            check(sample, "teacher", reference)


async def test_the_metadata_of_a_session_chooses_its_teacher(tmp_path: Path, reference: Path) -> None:
    async with serving_models(tmp_path, reference) as server:
        for domain in ("math", "code", "none"):
            await play(server, domain, {"domain": domain})
        teachers = [
            {"model": "reference", "metadata": {"domain": "math"}},
            {"model": "policy", "metadata": {"domain": ["math", "code"]}},
        ]
        found = await export(server, teachers=teachers)
        models = {entry["session_id"]: entry.get("teachers") for entry in found["sessions"]}
        assert {name: told and told["teacher"]["model"] for name, told in models.items()} == {
            "math": "reference",
            "code": "policy",
            "none": None,
        }
        for sample in found["samples"]:
            if sample["session_id"] == "none":
                assert set(sample["teacher_logprobs"]) == {None}
                continue
            check(sample, "teacher", reference if sample["session_id"] == "math" else builtin_model_folder())


@pytest.mark.parametrize("name", ["npz", "safetensors", "arrow", "parquet", "jsonl"])
async def test_each_format_has_the_same_scores(tmp_path: Path, reference: Path, name: str) -> None:
    async with serving_models(tmp_path, reference) as server:
        await play(server, "s")
        teachers = [{**REFERENCE, "top_k": 2}]
        expected = read((await server.post("/trajectories/export", {"teachers": teachers})).content, "json").samples
        sent = await server.post("/trajectories/export", {"teachers": teachers, "format": name})
        found = read(sent.content, name).samples
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            for column in ("ref_logprobs", "ref_top_token_ids", "ref_top_logprobs"):
                np.testing.assert_array_equal(one.extra[column], other.extra[column])
            assert one.extra["ref_top_token_ids"].shape == (len(one.input_ids), 2)
            assert (~np.isnan(one.extra["ref_logprobs"]) == (one.loss_mask > 0)).all()


async def test_new_weights_during_an_export_fail_it_and_store_nothing(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Gate.sample

    async def late(gate: Gate, request: GenerateRequest, *more: Any) -> Any:
        if request.scored_from is not None and not updated:
            updated.append(7)
            await server.ok("/engine/update_weights", {"path": str(reference), "version": 7})
        return await sample(gate, request, *more)

    updated: list[int] = []
    async with serving_models(tmp_path, reference) as server:
        await play(server, "s")
        monkeypatch.setattr(Gate, "sample", late)
        refused = await server.post("/trajectories/export", {"teachers": [{"model": "policy"}]})
        assert refused.status_code == 503, refused.text
        assert "changed from version 0 to 7" in refused.json()["error"]["message"]
        for found in (await export(server, teachers=[{"model": "policy"}]))["samples"]:
            check(found, "teacher", reference)


async def test_claims_and_layouts_have_them(tmp_path: Path, reference: Path) -> None:
    async with serving_models(tmp_path, reference) as server:
        await play(server, "s")
        told = await server.ok("/trajectories/export", {"teachers": [{**REFERENCE, "top_k": 2}], "layout": "tree"})
        (sample,) = told["samples"]
        assert sum(value is not None for value in sample["ref_logprobs"]) == sum(sample["loss_mask"])
        lengths = {"prompt_length": 64, "response_length": 64, "on_too_long": "truncate", "layout": "padded"}
        padded = await export(server, **lengths)
        for row in padded["samples"]:
            trained = np.asarray(row["loss_mask"], bool)
            present = np.asarray([value is not None for value in row["ref_logprobs"]])
            assert (trained == present).all() and trained.any()
        claimed = await server.ok("/trajectories/claim", {"export": {"teachers": [REFERENCE]}})
        for sample in claimed["samples"]:
            check(sample, "ref", reference)


def without_scores(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample without its scores, whose last digits depend on what is scored together."""
    return {name: value for name, value in sample.items() if name != "ref_logprobs"}


async def test_archived_sessions_are_scored_as_before(
    tmp_path: Path, reference: Path, scored: list[GenerateRequest]
) -> None:
    url, both = default_url(tmp_path), ["before", "after", "stays"]
    async with serving_models(tmp_path, reference) as server:
        for name in both:
            await play(server, name)
        await export(server, session_ids=["before"])
        await export(server, session_ids=["after"], teachers=[])
    assert archive_old(url, 0.0, str(tmp_path / "archive"), dry_run=False).sessions == 2
    assert len(scored) == 3
    async with serving_models(tmp_path, reference) as server:
        found = await export(server, session_ids=both)
        assert len(scored) == 3 + 6, "the scores of one session are in its file"
        assert [entry["session_id"] for entry in found["sessions"]] == both
        for sample in found["samples"]:
            check(sample, "ref", reference)
        again = await export(server, session_ids=both)
        assert list(map(without_scores, again["samples"])) == list(map(without_scores, found["samples"]))
        for sample in again["samples"]:
            check(sample, "ref", reference)
        assert len(scored) == 9 + 3, "scores of archived sessions are not stored"
        columns = "SELECT DISTINCT session_id FROM side_columns"
        assert execute(url, columns) == [("stays",)]


async def test_a_turn_that_the_teacher_cannot_take_is_named(tmp_path: Path, reference: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(reference, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    async with serving_models(tmp_path, short) as server:
        await play(server, "s")
        refused = await server.post("/trajectories/export", {"session_id": "s", "teachers": [REFERENCE]})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "teachers")
        turns = [turn["id"] for turn in await server.tree("s")]
        assert any(turn in error["message"] for turn in turns) and "takes 15" in error["message"]
