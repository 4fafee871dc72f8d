"""The client's readers return from every format the same samples as from JSON, as writable arrays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.test_export import always, chain
from tests.api.test_export_formats import FORMATS, PADDED, answer, forest
from tests.exports import entries
from tests.support import says, serving, user
from tokengrove.client import Export, Sample, read
from tokengrove.errors import InvalidRequest

ALL = (*FORMATS, "areal")
INT64 = {"prompts", "responses", "response_mask", "prompt_lengths", "response_lengths"}
FLOAT32 = {"logprobs", "rewards", "raw_rewards", "weight", "advantages", "step_advantages", "token_rewards"}
FLOAT32 |= {"rollout_log_probs", "rm_scores", "node_rewards", "node_returns"}
INT32 = {"input_ids", "loss_mask", "versions", "turn_ids", "node_offsets", "node_parents", "node_positions"}
INT32 |= {"__num_turns__"}


def dtype_of(name: str, layout: str) -> np.dtype[Any] | None:
    """The dtype of a column, or None for a label."""
    if name == "position_ids":
        return np.dtype(np.int64 if layout == "padded" else np.int32)
    kinds = ((INT64, np.int64), (FLOAT32, np.float32), (INT32, np.int32), ({"attention_mask"}, np.bool_))
    return next((np.dtype(kind) for names, kind in kinds if name in names), None)


def assert_holds(sample: Sample, row: dict[str, Any], layout: str) -> None:
    """Check that the sample has exactly the fields of the JSON row."""
    names = {name for name in Sample.__dataclass_fields__ if name != "extra"}
    assert set(sample.extra) == set(row) - names
    for name, value in row.items():
        found, dtype = sample.extra[name] if name in sample.extra else getattr(sample, name), dtype_of(name, layout)
        if dtype is None:
            assert (list(found) if isinstance(found, tuple) else found) == value, name
        else:
            assert (found.dtype, found.tolist()) == (dtype, np.array(value, dtype).tolist()), name


def layouts(*names: str) -> Any:
    choices = {
        "individual": {
            "layout": "individual",
            "discount": 0.5,
            "include": ["messages", "text"],
            "reward_scope": "path",
        },
        "concat": {"layout": "concat", "advantages": "grpo", "step_advantages": "grpo", "unrewarded": "zero"},
        "plain": {"layout": "concat", "train": {"turns": [1]}, "reward_scope": "path"},
        "masked": {"layout": "individual", "reward_name": "style", "reward_scope": "path", "unrewarded": "skip"},
        "tree": {"layout": "tree", "advantages": "leave_one_out"},
        "padded": {**PADDED, "include": ["text"]},
        "cut": {**PADDED, "prompt_length": 4, "response_length": 8, "on_too_long": "truncate", "keep": "tail"},
    }
    return pytest.mark.parametrize("options", [choices[name] for name in names], ids=names)


@layouts("individual", "concat", "plain", "masked", "tree", "padded", "cut")
async def test_every_format_is_read_as_the_samples_of_json(tmp_path: Path, options: dict[str, Any]) -> None:
    async with serving(tmp_path, always()) as server:
        await forest(server)
        plain = json.loads((await answer(server, **options)).content)
        for name in ALL:
            refused = "advantages" in options or options["layout"] in ("tree", "padded")
            if (name == "areal" and refused) or (name == "safetensors" and "include" in options):
                continue
            body = (await answer(server, format=name, **options)).content
            (tmp_path / name).write_bytes(body)
            for export in (read(body, name), read(tmp_path / name, name)):
                assert export.sessions == entries(plain), name
                for sample, row in zip(export.samples, plain["samples"], strict=True):
                    if options["layout"] == "padded":  # a column of fixed width is 0 in a row that has none
                        assert not np.any(sample.extra.get("token_rewards", 0)) or "token_rewards" in row
                        zeros = {"token_rewards": [0.0] * len(row["input_ids"])}
                        row = {**zeros, **row} if "token_rewards" in sample.extra else row
                    assert_holds(sample, row, options["layout"])


@pytest.mark.parametrize("name", ALL)
async def test_the_arrays_read_are_writable_and_the_file_does_not_change(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server)
        body = (await answer(server, format=name, layout="concat")).content
    file = tmp_path / "page"
    file.write_bytes(body)
    for source in (body, file):
        sample = read(source, name).samples[0]
        for array in (sample.input_ids, sample.loss_mask, sample.logprobs, sample.attention_mask):
            array[:] = 0
        assert not sample.input_ids.any()
    assert file.read_bytes() == body


@pytest.mark.parametrize("name", ALL)
async def test_an_empty_export_is_read_as_no_samples(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, always()) as server:
        assert read((await answer(server, format=name)).content, name) == Export([], {})
        await server.ok("/rl/start_session", {"task_id": "task", "session_id": "empty"})
        export = read((await answer(server, format=name)).content, name)
        assert (export.samples, list(export.sessions)) == ([], ["empty"])


@pytest.mark.parametrize("name", ALL)
async def test_a_truncated_export_is_refused_wherever_it_ends(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        first = await server.answer([user("a")])
        await server.answer([user("a"), first, user("b")])
        body = (await answer(server, format=name, layout="concat")).content
    assert len(read(body, name).samples) == 1
    for kept in (0, 7, len(body) // 2, len(body) - 40):
        with pytest.raises(InvalidRequest, match=f"format {name}"):
            read(body[:kept], name)
    (tmp_path / "file").write_bytes(b"hello, world: this is no export at all")
    (tmp_path / "nothing").touch()
    for source in (tmp_path / "file", str(tmp_path / "nothing"), tmp_path / "absent", b"[]"):
        if name == "jsonl" and source == str(tmp_path / "nothing"):
            continue  # a complete file without samples
        with pytest.raises(InvalidRequest, match=f"format {name}"):
            read(source, name)


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    for source in (b"", tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidRequest, match="safetensors, arrow"):
            read(source, "pickle")


def test_without_pyarrow_only_the_formats_that_need_it_are_refused() -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from tokengrove.client import read\n"
        "from tokengrove.errors import InvalidRequest\n"
        "for name in ('arrow', 'parquet'):\n"
        "    try: read(b'', name)\n"
        "    except InvalidRequest as error: print(error.message)\n"
        """print(read(b'{"samples": [], "sessions": [], "cursor": null}', "json"))\n"""
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[:2] == ["this needs pyarrow: pip install pyarrow"] * 2
    assert run.stdout.count("Export(") == 1
