"""Writes the trajectories of a batch in ROLL's format: one file per step, with a JSON object of columns on one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.values import DataProto

_COLUMNS = ("COLUMMNS_CONFIG", "COLUMNS_CONFIG")  # the spellings of ROLL's code and of its documentation


def check_dump_path(path: str | Path | None) -> None:
    """Raise InvalidRequest for a path that is not a folder, such as ROLL's `odps://...`."""
    if path and "://" in str(path):
        raise InvalidRequest(f"rollout_dump_dir is {path!r}; it must be a folder", param="rollout_dump_dir")


def dump_rollout_trajectories(path: str | Path | None, global_step: int, data: DataProto) -> None:
    """Write the columns that `data.meta_info["COLUMMNS_CONFIG"]` names to `path`/rollout_dump_data.step_N.jsonl.

    As in ROLL, the columns are removed from `data`, and rows with None in one of them are not written. Without a path
    or columns, this does nothing. Raises InvalidRequest for a path that is not a folder.
    """
    check_dump_path(path)
    told = next((data.meta_info[name] for name in _COLUMNS if data.meta_info.get(name)), ())
    names = [name for name, _ in told if name in data.non_tensor_batch]
    if not path or not names:
        return
    columns = [[_plain(value) for value in data.non_tensor_batch.pop(name)] for name in names]
    rows = [row for row in zip(*columns, strict=True) if None not in row]
    written: dict[str, list[Any]] = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    written["global_step"] = [global_step] * len(rows)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(written, ensure_ascii=False) + "\n"
    (folder / f"rollout_dump_data.step_{global_step}.jsonl").write_text(text, encoding="utf-8")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
