"""Harbor task folders that tests write for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PASSES = "mkdir -p /logs/verifier\ngrep -qx right /app/answer.txt && echo 1 > {0} || echo 0 > {0}\n".format(
    "/logs/verifier/reward.txt"
)
"""Tests that are passed by the word `right` in /app/answer.txt."""


def write(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files below `folder`; scripts get the line that names their shell."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}" if name.endswith(".sh") else text)
    return folder


def task(folder: Path, config: str = "", files: Mapping[str, str] | None = None) -> Path:
    """A task about a word in /app/answer.txt; `files` are written over those of it, `None` as text leaves one out."""
    parts = {
        "task.toml": config,
        "instruction.md": "Write the word.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "tests/test.sh": PASSES,
        "solution/solve.sh": "echo right > /app/answer.txt\n",
    }
    return write(folder, {**parts, **(files or {})})
