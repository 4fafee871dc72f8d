"""Reads the reward that a verifier wrote: `reward.json` or `reward.txt` in a folder for its reward only.

A link, a pipe or a folder in place of the file is an error, as is a value that is not a finite number.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JSON_FILE, TEXT_FILE = "reward.json", "reward.txt"
_SHOWN = 200
REWARD_BYTES = 64 * 1024
"""The maximum size of a reward file."""


def read_reward(folder: Path) -> dict[str, float] | None:
    """The rewards by name; `reward` is the reward of the session. None if there is no file.

    Raises ValueError, with the file's name, for an invalid reward, and OSError for a file that cannot be read.
    """
    for name in (JSON_FILE, TEXT_FILE):
        try:
            content = _content(folder / name)
        except FileNotFoundError:
            continue
        return parse_reward(name, content)
    return None


def parse_reward(name: str, content: bytes) -> dict[str, float]:
    """The rewards in the content of a reward file. Raises ValueError."""
    try:
        text = content.decode()
        value = json.loads(text) if name == JSON_FILE else float(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {error}") from None
    return _named(name, value)


def main_reward(values: Mapping[str, float]) -> float:
    """The value named `reward`, or the only value. Raises ValueError if there is neither."""
    if "reward" in values:
        return values["reward"]
    if len(values) != 1:
        raise ValueError(f"no value is named reward: {', '.join(values) or 'there are none'}")
    return next(iter(values.values()))


def number(value: Any) -> float:
    """A reward as a float. Raises ValueError unless it is a finite number."""
    try:
        found = float(value) if isinstance(value, bool | int | float) else math.nan
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(
            f"{value!r} is not a finite number" if len(repr(value)) < _SHOWN else "it is not a finite number"
        )
    return found


def _named(name: str, value: Any) -> dict[str, float]:
    try:
        if isinstance(value, dict):
            return {str(key): number(each) for key, each in value.items()}
        return {"reward": number(value)}
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _content(path: Path) -> bytes:
    """Read a regular file of limited size. Raises ValueError for anything else."""
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link")
    # O_NONBLOCK: opening a pipe must not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a file")
        content = os.read(descriptor, REWARD_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > REWARD_BYTES:
        raise ValueError(f"{path.name} has more than {REWARD_BYTES} bytes")
    return content
