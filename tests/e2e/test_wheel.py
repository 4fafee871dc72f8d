"""The package as users install it: from a wheel, and editable from a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT

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
    assert top_level == {"proxy", "tokengrove.py"}
    assert {"proxy/py.typed", "proxy/migrations/env.py", "proxy/migrations/script.py.mako"} <= set(names)
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
    assert (module, package) == (str(installed / "tokengrove.py"), str(installed / "proxy" / "__init__.py"))


def test_the_client_is_imported_from_an_editable_install(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip("install", "--no-deps", "--editable", ROOT, python=python)
    module, package, *_ = imported_from(python, tmp_path)
    assert (module, package) == (str(ROOT / "tokengrove.py"), str(ROOT / "proxy" / "__init__.py"))
