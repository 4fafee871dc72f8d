"""The environments of the gateways: each has its own, since their requirements conflict.

`python -m benchmarks.environments rllm litellm` makes those of these gateways from `requirements/NAME.txt`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.gateways import GATEWAYS
from benchmarks.gateways.base import Gateway

HERE = Path(__file__).parent
FOLDER = HERE / ".environments"


def python_of(gateway: Gateway, folder: Path) -> Path | None:
    """Return the interpreter of a gateway's environment; None if it is not installed.

    The running interpreter counts if it has the gateway's package, or if there is no package.
    """
    own = folder / gateway.name / "bin" / "python"
    if own.exists():
        return own
    running = Path(sys.executable)
    return running if gateway.package is None or version_of(gateway, running) else None


def version_of(gateway: Gateway, python: Path) -> str:
    """Return the version of a gateway's package in an environment; "" if it is not there."""
    if gateway.package is None:
        return ""
    code = f"import importlib.metadata as m; print(m.version({gateway.package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def install(name: str, python: str, folder: Path) -> None:
    """Make the environment of a gateway."""
    place = folder / name
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    for requirements in sorted((HERE / "requirements").glob(f"{name}*.txt")):
        options = ["--no-deps"] if requirements.stem.endswith("-without-dependencies") else []
        subprocess.run([str(place / "bin" / "pip"), "install", *options, "-r", str(requirements)], check=True)


def main() -> None:
    names = sorted(path.stem for path in (HERE / "requirements").glob("*.txt") if path.stem in GATEWAYS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gateways", nargs="+", choices=names)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the new environments")
    parser.add_argument("--environments", type=Path, default=FOLDER, help="folder of the environments")
    options = parser.parse_args()
    for name in options.gateways:
        install(name, options.python, options.environments)


if __name__ == "__main__":
    main()
