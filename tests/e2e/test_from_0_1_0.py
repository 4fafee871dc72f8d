"""A database that a server of 0.1.0 wrote is upgraded, and its samples have the tokens that 0.1.0 exported.

`version-0.1.0.db.xz` has three sessions of six turns over three APIs, which its scripted engine played.
`version-0.1.0.json` is what that server then exported of session `a` in layout concat.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np

from tests.e2e.processes import ROOT, run, server_process
from tokengrove import Client, Sample

GOLDEN = ROOT / "tests" / "golden"


def test_a_database_of_0_1_0_is_upgraded_checked_and_exported_with_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    path.write_bytes(lzma.decompress((GOLDEN / "version-0.1.0.db.xz").read_bytes()))
    database = ("--database-url", f"sqlite:///{path}")
    assert "revision 0003" in run("db", "current", *database, cwd=tmp_path).stdout
    upgraded = run("db", "upgrade", *database, cwd=tmp_path)
    assert upgraded.returncode == 0, upgraded.stderr
    filled = run("db", "check", "--fill", *database, cwd=tmp_path)
    assert filled.returncode == 0 and "3 sessions, 18 interactions" in filled.stdout and " 0 findings" in filled.stdout
    assert "missing" not in run("db", "check", *database, cwd=tmp_path).stdout
    with server_process(tmp_path, "--engine", "scripted", database_url=database[1]) as server:
        client = Client(server.url)
        samples = client.export(session_id="a", layout="concat").samples
        by_path = client.export(session_id="a", layout="concat", reward_scope="path").samples
    old = json.loads((GOLDEN / "version-0.1.0.json").read_text())
    assert [tokens_of(sample) for sample in samples] == [
        (
            each["interaction_id"],
            each["input_ids"],
            each["loss_mask"],
            np.float32(each["logprobs"]).tolist(),
            each["versions"],
        )
        for each in old
    ]
    assert [sample.rewards.tolist() for sample in by_path] == [each["rewards"] for each in old]
    assert {sample.rewards.item() for sample in samples} == {1.0}


def tokens_of(sample: Sample) -> tuple[str, list[int], list[int], list[float], list[int]]:
    return (
        sample.interaction_id,
        sample.input_ids.tolist(),
        sample.loss_mask.astype(int).tolist(),
        sample.logprobs.tolist(),
        sample.versions.tolist(),
    )
