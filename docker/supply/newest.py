"""Runs the suites of clients and engines against the newest releases, and prints what broke: package by package.

    PYTHONPATH=docker python -m supply.newest              # all sets, hours; `--list` names them
    PYTHONPATH=docker python -m supply.newest sdks graphs  # some

Each set gets an environment of its own. Its packages are installed in their newest versions; where these conflict, the
conflict is told, and the newest versions that fit together are tested. A set for which nothing is newer than what is
pinned is left out, unless `--all` is given. The exit code is 1 if something broke or cannot be installed.

Run it in an environment with `tokengrove[test]`, which serves the clients, and uv. Other indexes, such as one with
torch's CPU builds, are given by uv's variables (`UV_INDEX`, `UV_FIND_LINKS`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from supply import locks

ROOT = Path(__file__).resolve().parents[2]
CONFORMANCE = ROOT / "tests" / "conformance"
ENGINES = ROOT / "tests" / "engines"
# Builds for the CPU are not newest: what is newest on PyPI is CUDA's. They change with `pyproject.toml`.
_KEPT = ("torch", "torchdata")
# Tests of npm's packages, of which nothing is installed here.
_NPM = ("test_js", "test_clis")
_LONGEST = 200  # characters of an error in the table


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests: paths below the checkout, and which of them (`-k`, `-m`)."""

    paths: str
    chosen: str = ""
    marked: str = ""


@dataclass(frozen=True, slots=True)
class Set:
    """Packages that are tested together.

    `pinned`: the version of each that is known to work, by what pip installs (`name[extra]`). `kept`: requirements that
    are installed as they are. `alone`: packages that are installed without their dependencies, after all others. The
    versions that the newest `leader`, one of them, asks for replace those in `kept` and `alone`.
    """

    name: str
    pinned: Mapping[str, str]
    suites: Sequence[Suite]
    kept: Sequence[str] = ()
    alone: Mapping[str, str] = field(default_factory=dict)
    leader: str | None = None
    python: str = sys.executable
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    """What became of a set. `installed`: the version of each package. `conflict`: why not all are the newest."""

    installed: dict[str, str] = field(default_factory=dict)
    conflict: str = ""
    unusable: str = ""
    failed: list[str] = field(default_factory=list)
    passed: int = 0

    @property
    def broke(self) -> bool:
        return bool(self.failed or self.unusable)


def sets() -> dict[str, Set]:
    """All sets by name."""
    found = [*_client_sets(), _dependencies(), _sglang()]
    return {each.name: each for each in found}


def _client_sets() -> Iterator[Set]:
    suites: dict[str, list[Suite]] = {}
    for line in (CONFORMANCE / "sets.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, paths, chosen = line.split("|")
            if not any(f"{module}.py" in paths for module in _NPM):
                without = " and ".join(f"not {module}" for module in _NPM)
                suites.setdefault(name, []).append(Suite(paths, f"({chosen}) and {without}" if chosen else without))
    for name, each in suites.items():
        pinned = pins((CONFORMANCE / f"{name}.txt").read_text())
        kept = [f"{package}=={version}" for package, version in pinned.items() if package in _KEPT]
        trainers = name == "requirements-trainers"
        yield Set(
            name.removeprefix("requirements-") if name != "requirements" else "sdks",
            {package: version for package, version in pinned.items() if package not in _KEPT},
            each,
            kept=kept,
            alone={"verl": "0.9.1", "areal": "1.0.4"} if trainers else {},
            python=_interpreter("3.12") if name == "requirements-openhands" else sys.executable,
        )


def _interpreter(version: str) -> str:
    """An interpreter of a version: one of pyenv's, whose `python3.12` on the path may lead nowhere; else its name."""
    return str(next(Path.home().glob(f".pyenv/versions/{version}*/bin/python"), f"python{version}"))


def _dependencies() -> Set:
    """Our own dependencies, without upper bounds. What works is what the CPU image has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        Requirement(text) for text in [*project["dependencies"], *extras["cpu"], *extras["postgres"], *extras["otel"]]
    ]
    locked = {canonicalize_name(name): version for name, (version, _) in _locked().items()}
    pinned = {_installable(each): locked[canonicalize_name(each.name)] for each in wanted if each.name not in _KEPT}
    ours = [text for text in extras["test"] if not text.startswith(("tokengrove", "openai"))]
    tests = [*ours, *extras["renderers"], *extras["export"]]
    kept = [str(each) for each in wanted if each.name in _KEPT]
    return Set(
        "dependencies", pinned, (Suite("tests/unit tests/api"), Suite("tests/engines", marked="engines")), kept + tests
    )


def _sglang() -> Set:
    """SGLang on CPU."""
    asked = (ENGINES / "requirements-sglang.txt").read_text().splitlines()
    kept = [line for line in asked if line and not line.startswith("#")]
    return Set(
        "sglang",
        {},
        (Suite("tests/engines", marked="engines"),),
        [*kept, "torch==2.13.0", "transformers==5.19.0"],
        alone=pins((ENGINES / "requirements-sglang-pinned.txt").read_text()),
        leader="sglang",
        variables={"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ENGINES / 'shim'}:{ROOT}"},
    )


def pins(text: str) -> dict[str, str]:
    """The packages of a requirements file that have an exact version, as pip installs them, and the version."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    found = [Requirement(line) for line in lines if "==" in line]
    found = [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]
    return {_installable(each): str(each.specifier).removeprefix("==") for each in found}


def _installable(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return requirement.name + extras


def _locked() -> dict[str, tuple[str, tuple[str, ...]]]:
    [cpu] = [lock for lock in locks.ALL if lock.name == "cpu"]
    return locks.entries(cpu.path.read_text())


def newest_of(chosen: Set) -> tuple[Set, dict[str, str]]:
    """The newest release of each package of a set, and the set as its leader's release wants it.

    Raises CalledProcessError, and OSError if there is no such interpreter.
    """
    led = {name for name in chosen.alone if chosen.leader not in (None, name)}
    packages = [*chosen.pinned, *(name for name in chosen.alone if name not in led)]
    command = [chosen.python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    done = subprocess.run([*command, "--report", "-", *packages], check=True, capture_output=True, text=True)
    about = {
        canonicalize_name(each["metadata"]["name"]): each["metadata"] for each in json.loads(done.stdout)["install"]
    }
    newest = {each: str(about[canonicalize_name(Requirement(each).name)]["version"]) for each in packages}
    if chosen.leader is None:
        return chosen, newest
    asked = pins("\n".join(about[canonicalize_name(chosen.leader)].get("requires_dist", ())))
    exact = {name for text in chosen.kept if (name := Requirement(text).name) in asked}
    kept = [text for text in chosen.kept if Requirement(text).name not in exact]
    newest |= {name: asked.get(name, chosen.alone[name]) for name in led}
    return replace(chosen, kept=[*kept, *(f"{name}=={asked[name]}" for name in sorted(exact))]), newest


def conflict_of(output: str) -> str:
    """What uv says is in conflict, in one line; else its first error; else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = next((number for number, line in enumerate(lines) if "Because " in line), None)
    if told is not None:
        rest = takewhile(lambda line: not line.startswith(("hint:", "help:")), lines[told:])
        return " ".join(rest).removeprefix("cause: ")
    errors = [line for line in lines if line.lower().startswith("error:")]
    return errors[0].partition(":")[2].strip() if errors else (lines or ["the installation failed"])[-1]


def test(chosen: Set, newest: Mapping[str, str], folder: Path) -> Result:
    """Install the newest versions of a set in `folder`, and run its suites."""
    result = Result()
    try:
        subprocess.run([chosen.python, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        result.unusable = f"{chosen.python} makes no environment: {error}"
        return result
    python = str(folder / "bin" / "python")
    if not _install(python, chosen, newest, result):
        return result
    for number, suite in enumerate(chosen.suites):
        _run(python, suite, chosen.variables, folder / f"{number}.xml", result)
    return result


def _install(python: str, chosen: Set, newest: Mapping[str, str], result: Result) -> bool:
    exact = [f"{name}=={newest[name]}" for name in chosen.pinned]
    done = _uv(python, [*chosen.kept, *exact])
    if done.returncode != 0:
        result.conflict = conflict_of(done.stdout + done.stderr)
        # The newest that fit together: what is pinned does, so there are some.
        done = _uv(python, [*chosen.kept, *(f"{name}>={version}" for name, version in chosen.pinned.items())])
    if done.returncode == 0 and chosen.alone:
        done = _uv(python, ["--no-deps", *(f"{name}=={newest[name]}" for name in chosen.alone)])
    if done.returncode != 0:
        result.unusable = "cannot be installed: " + conflict_of(done.stdout + done.stderr)
        return False
    listed = json.loads(
        subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True).stdout
    )
    versions = {canonicalize_name(each["name"]): each["version"] for each in listed}
    for name in (*chosen.pinned, *chosen.alone):
        result.installed[name] = versions.get(canonicalize_name(Requirement(name).name), "none")
    return True


def _uv(python: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # pip may try older releases of everything for hours before it says what is in conflict.
    command = ["uv", "pip", "install", "--quiet", "--python", python, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def _run(python: str, suite: Suite, variables: Mapping[str, str], report: Path, result: Result) -> None:
    command = [python, "-m", "pytest", "-q", *suite.paths.split(), f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += [*(("-k", suite.chosen) if suite.chosen else ()), *(("-m", suite.marked) if suite.marked else ())]
    environment = {"TOKENGROVE_TEST_SERVER_PYTHON": sys.executable, **os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if report.exists():
        passed, failed = read_report(report.read_text())
        result.passed += passed
        result.failed += failed
    if done.returncode not in (0, 1) or not report.exists():
        lines = (done.stdout + done.stderr).strip().splitlines() or [f"pytest ended with {done.returncode}"]
        result.unusable = f"{suite.paths} did not run: {lines[-1]}"


def read_report(text: str) -> tuple[int, list[str]]:
    """How many tests of a JUnit report passed, and those that failed, each with the first line of its error."""
    passed, failed = 0, []
    for case in ElementTree.fromstring(text).iter("testcase"):
        fault = next((each for each in case if each.tag in ("failure", "error")), None)
        if fault is not None:
            message = (fault.get("message") or "").strip().splitlines()
            failed.append(
                f"{case.get('classname')}.{case.get('name')}: {message[0][:_LONGEST] if message else 'failed'}"
            )
        elif not any(each.tag == "skipped" for each in case):
            passed += 1
    return passed, failed


def table(chosen: Set, newest: Mapping[str, str], result: Result) -> str:
    """What became of a set, for people: a row for each package, then the conflict and the tests that failed."""
    rows = [("package", "pinned", "newest", "installed")]
    for name, version in {**chosen.pinned, **chosen.alone}.items():
        rows.append((name, version, newest.get(name, "?"), result.installed.get(name, "-")))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines[0] = f"{chosen.name}: {result.passed} passed, {len(result.failed)} failed\n{lines[0]}"
    lines += [f"these versions conflict: {result.conflict}"] if result.conflict else []
    lines += [f"BROKEN: {result.unusable}"] if result.unusable else []
    lines += [f"BROKEN: {failure}" for failure in result.failed]
    return "\n".join(lines) + "\n"


def run(names: Sequence[str], everything: bool, keep: Path | None) -> bool:
    """Test sets and print what became of each. True if nothing broke."""
    known, fine = sets(), True
    if shutil.which("uv") is None:
        sys.exit("uv is missing: pip install uv")
    for name in names or known:
        try:
            chosen, newest = newest_of(known[name])
        except (OSError, subprocess.CalledProcessError) as error:
            said = conflict_of(error.stderr) if isinstance(error, subprocess.CalledProcessError) else str(error)
            print(f"{name}: BROKEN: {said}\n", flush=True)
            fine = False
            continue
        if not everything and newest == {**chosen.pinned, **chosen.alone}:
            print(f"{name}: nothing is newer than what is pinned\n", flush=True)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            result = test(chosen, newest, (keep or Path(scratch)) / name)
        print(table(chosen, newest, result), flush=True)
        fine = fine and not result.broke
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="SET", help="all if none is named")
    parser.add_argument("--list", action="store_true", help="name the sets and their packages")
    parser.add_argument("--all", action="store_true", help="also sets for which nothing is newer")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="leave the environments in this folder")
    options = parser.parse_args()
    if options.list:
        for name, each in sets().items():
            print(f"{name}: {', '.join([*each.pinned, *each.alone])}")
        return
    if unknown := set(options.sets) - sets().keys():
        parser.error(f"there is no set {min(unknown)}; there are {', '.join(sets())}")
    sys.exit(not run(options.sets, options.all, options.keep))


if __name__ == "__main__":
    main()
