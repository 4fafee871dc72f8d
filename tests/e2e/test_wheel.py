"""The package as users install it: from a wheel, and editable from a checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT, server_process

pytestmark = pytest.mark.engines  # pip downloads the build backend

# Prints the location of the package. The module of migrations is the only one that reads files beside the code.
_IMPORTS = """
import proxy, tokengrove
from tokengrove import Client
from proxy.store import migrations
print(tokengrove.__file__, proxy.__file__, Client.__name__, migrations.head())
"""


def pip(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    subprocess.run([python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    [built] = folder.glob("*.whl")
    return built


def imported_from(python: str | Path, folder: Path, *path: str | Path) -> list[str]:
    """The output of `_IMPORTS` with `path` searched first, then the packages that this test runs with."""
    packages = [entry for entry in sys.path if "site-packages" in entry]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, *packages]))}
    command = [python, "-c", _IMPORTS]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_the_wheel_has_the_client_its_types_and_the_migrations_and_no_other_top_level_module(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top_level == {"proxy", "tokengrove"}
    assert {
        "proxy/py.typed",
        "tokengrove/py.typed",
        "proxy/migrations/env.py",
        "proxy/migrations/script.py.mako",
    } <= set(names)
    migrations = {f"proxy/migrations/versions/{path.name}" for path in (ROOT / "migrations" / "versions").glob("*.py")}
    assert migrations and migrations <= set(names)
    page = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "proxy" / "page" / "static").rglob("*") if path.is_file()
    }
    assert len(page) > 30 and page <= set(names)


def test_the_client_is_imported_from_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    pip("install", "--no-deps", "--target", installed, wheel)
    module, package, *_ = imported_from(sys.executable, tmp_path, installed)
    assert (module, package) == (
        str(installed / "tokengrove" / "__init__.py"),
        str(installed / "proxy" / "__init__.py"),
    )


def test_the_client_is_imported_from_an_editable_install(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip("install", "--no-deps", "--editable", ROOT, python=python)
    module, package, *_ = imported_from(python, tmp_path)
    assert (module, package) == (str(ROOT / "tokengrove" / "__init__.py"), str(ROOT / "proxy" / "__init__.py"))


class Environment:
    """A virtual environment that also has the packages of this one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.python = folder / "bin" / "python"
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "of_the_tests.pth").write_text("\n".join(path for path in sys.path if "site-packages" in path))

    def pip(self, *arguments: str | Path) -> None:
        pip(*arguments, python=self.python)

    def run(self, *arguments: str | Path, folder: Path) -> tuple[int, str]:
        """The exit code of a command of Python, and what it says."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([self.python, *arguments], cwd=folder, env=variables, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr


_OTHER = "proxy.py==2.4.10"
_IN_THE_WAY = (
    r"tokengrove: the package `proxy` of proxy\.py is in the way of the server's \(.*\): pip uninstall proxy\.py.*\n"
)
_INCOMPLETE = "tokengrove: the server's package `proxy` is incomplete: pip install --force-reinstall .*\n"
_NO_ENGINE = r"(.*\n)*tokengrove: --engine nothing is unknown.*\n"
_USERS = (
    "import tokengrove.areal, tokengrove.verl, tokengrove.roll, tokengrove.openenv, tokengrove.trl, tokengrove.runs"
)
_SERVE = ("-m", "tokengrove", "serve", "--engine", "nothing", "--port", "0")


def test_beside_another_package_named_proxy_all_but_the_server_works_and_the_server_names_it(
    wheel: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "env")
    environment.pip("install", "--no-deps", _OTHER)
    environment.pip("install", "--no-deps", wheel)
    assert re.fullmatch(_NO_ENGINE, environment.run(*_SERVE, folder=tmp_path)[1])
    environment.pip("uninstall", "--yes", "proxy.py")  # takes the module along that it shares with the server
    assert re.fullmatch(_INCOMPLETE, environment.run(*_SERVE, folder=tmp_path)[1])
    environment.pip("install", "--no-deps", _OTHER)
    code, told = environment.run(*_SERVE, folder=tmp_path)
    assert code == 1 and re.fullmatch(_IN_THE_WAY, told)
    assert environment.run("-c", f"{_USERS}; import proxy; proxy.main", folder=tmp_path) == (0, "")
    (tmp_path / "agents.py").write_text(_AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "one"}\n{"task_id": "two"}\n')
    play = (
        "-m",
        "tokengrove",
        "rollout",
        "agents:solve",
        "--data",
        "tasks.jsonl",
        "--output",
        "out",
        "--quiet",
        "--json",
    )
    with server_process(tmp_path, "--engine", "scripted") as server:
        code, told = environment.run(*play, "--url", server.url, folder=tmp_path)
        assert code == 0, told
        shown = environment.run("-m", "tokengrove", "show", "--url", server.url, folder=tmp_path)
    assert shown[0] == 0 and "one" in shown[1] and "two" in shown[1]
    code, told = environment.run(*play, folder=tmp_path)
    assert code == 1 and re.fullmatch(_IN_THE_WAY, told)


_AGENT = """
import httpx


def solve(data, base_url, api_key):
    body = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": data["task_id"]}]}
    headers = {"authorization": f"Bearer {api_key}"}
    httpx.post(f"{base_url}/chat/completions", json=body, headers=headers).raise_for_status()
    return 1.0
"""
