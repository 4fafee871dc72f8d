"""Builds the files of a release in an empty folder, and refuses what must not be released. Uploads nothing.

    .ci/release                       # to dist/VERSION
    .ci/release --trial --to FOLDER   # also from a changed tree, and before the changelog names the version

`.ci/release` makes an environment from docker/locks/release.txt and runs this module in it. The folder gets the sdist,
the wheel, the bill of materials of the wheel with the extras `postgres` and `otel` as docker/locks/file.txt pins their
packages, and SHA256SUMS. The same commit gives the same sdist and wheel, byte for byte: they have the commit's time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from supply import sbom
from tokengrove import __version__

ROOT = Path(__file__).resolve().parents[2]
# An image's tag, in commands, compose files and manifests. Kustomize has the name and the tag on lines of their own.
_TAG = re.compile(r"(?:\btokengrove:|\bnewTag: *)(\d+\.[\w.]+)")


class Refused(Exception):
    """The tree cannot be released; the text says why, and what to do."""


def check_clean(root: Path) -> None:
    """Raise Refused if the tree of a checkout differs from its commit."""
    changed = _said("git", "status", "--porcelain", folder=root)
    if changed:
        raise Refused(f"the tree differs from its commit; commit or remove:\n{changed}")


def check_changelog(text: str, version: str) -> None:
    """Raise Refused unless the first heading of a changelog is this version, with something below it."""
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    if not headings or headings[0].split()[0] != version:
        raise Refused(f"CHANGELOG.md begins with {headings[:1]}, not with `## {version}`")
    if not text.split(f"## {headings[0]}\n", 1)[1].split("\n## ", 1)[0].strip():
        raise Refused(f"CHANGELOG.md says nothing of {version}")


def other_tags(root: Path, version: str) -> list[str]:
    """The places, `file:line`, in `docker` and `docs` that name an image of another version."""
    found = []
    for path in sorted([*(root / "docker").rglob("*"), *(root / "docs").glob("*.md")]):
        if not path.is_file() or path.suffix == ".pyc":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if any(tag != version for tag in _TAG.findall(line)):
                found.append(f"{path.relative_to(root)}:{number}")
    return found


def build(root: Path, folder: Path) -> list[Path]:
    """Build the sdist and, from it, the wheel. Raises CalledProcessError, also if PyPI would not show the README."""
    # The build's own folder: what `dist` of the checkout has from other builds is not part of the release.
    time = _said("git", "log", "-1", "--format=%ct", folder=root)
    _run("build", "--no-isolation", "--outdir", folder, root, SOURCE_DATE_EPOCH=time)
    files = sorted(folder.iterdir())
    _run("twine", "check", "--strict", *files)
    return files


def write_bill(wheel: Path, output: Path) -> None:
    """Write the bill of materials of a wheel, installed in an environment of its own. Exits if a licence is unknown."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        install = ("pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*install, "--require-hashes", "-r", sbom.ROOT / "docker" / "locks" / "file.txt", python=python)
        # Without an index: what the lock does not have is an error, not a download.
        _run(*install, "--no-index", f"{wheel}[postgres,otel]", python=python)
        installed = _said(python, "-c", "import tokengrove; print(tokengrove.__version__)", folder=Path(folder))
        if installed != __version__:
            raise Refused(f"the wheel has the version {installed}, this tree {__version__}")
        sbom.write(python, output)


def write_sums(folder: Path) -> str:
    """Write SHA256SUMS of all files in a folder, as `sha256sum --check` reads it. Returns its text."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return "".join(lines)


def release(root: Path, folder: Path, trial: bool = False) -> str:
    """Check the tree and write the files of the release to an empty folder. Returns their sums. Raises Refused."""
    if not trial:
        check_clean(root)
        check_changelog((root / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
    if other := other_tags(root, __version__):
        raise Refused(f"images of other versions than {__version__} (tokengrove/__init__.py): {', '.join(other)}")
    if folder.exists() and any(folder.iterdir()):
        raise Refused(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    [wheel] = [path for path in build(root, folder) if path.suffix == ".whl"]
    write_bill(wheel, folder / f"tokengrove-{__version__}.cdx.json")
    return write_sums(folder)


def _run(module: str, *arguments: str | Path, python: str = sys.executable, **variables: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, "-m", module, *arguments], check=True, env=inherited | variables)


def _said(*command: str, folder: Path) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=inherited, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(prog=".ci/release", description="Build the files of a release. Uploads nothing.")
    parser.add_argument("--to", type=Path, default=ROOT / "dist" / __version__, help="an empty folder (dist/VERSION)")
    parser.add_argument("--trial", action="store_true", help="do not look at the tree's state and the changelog")
    options = parser.parse_args()
    try:
        sums = release(ROOT, options.to.absolute(), options.trial)
    except (Refused, subprocess.CalledProcessError) as error:
        sys.exit(f".ci/release: {error}")
    print(f"{options.to}:\n{sums}Nothing was uploaded.")


if __name__ == "__main__":
    main()
