"""What the tests need: Chromium, Node.js and axe-core. A test that lacks one is skipped; in CI it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

AXE_VERSION = "4.14.1"
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_NPM_S = 120


def missing(what: str) -> NoReturn:
    """Skip the test; fail it in CI, where everything has to be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}, and CI is true")
    pytest.skip(what)


def chromium() -> str:
    """The path of the browser."""
    found = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    return found or missing(f"no {', '.join(_CHROMIUM)} on PATH (Debian: apt-get install chromium)")


def node() -> str:
    """The path of Node.js, 20 or later."""
    return shutil.which("node") or missing("no node on PATH (Debian: apt-get install nodejs)")


def axe(folder: Path) -> str:
    """The source of axe-core, which npm brings into `folder` once."""
    kept = folder / f"axe-core-{AXE_VERSION}.js"
    if not kept.exists():
        npm = shutil.which("npm") or missing("no npm on PATH, which brings axe-core (Debian: apt-get install npm)")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = [npm, "pack", f"axe-core@{AXE_VERSION}", "--silent"]
            packed = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=_NPM_S)
            if packed.returncode:
                missing(f"npm pack axe-core@{AXE_VERSION} failed: {packed.stderr[-300:]}")
            with tarfile.open(Path(scratch) / packed.stdout.strip()) as archive:
                source = archive.extractfile("package/axe.min.js")
                assert source is not None
                (new := Path(scratch) / "axe.js").write_bytes(source.read())
            new.replace(kept)
    return kept.read_text(encoding="utf-8")
