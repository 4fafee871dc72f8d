"""The server is found, or what is in its way is named; `testing` and `engine` of `tokengrove` give parts of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import tokengrove.engine
from proxy.engine.interface import EngineInfo
from tokengrove import Client, testing
from tokengrove.errors import ConfigurationError
from tokengrove.server_part import server_part

ROOT = Path(__file__).resolve().parents[2]


def test_a_part_of_the_server_is_its_module() -> None:
    import proxy.app

    assert server_part("app") is proxy.app


@pytest.mark.parametrize("command", ["serve", "db", "doctor"])
def test_a_folder_of_that_name_is_named(command: str, tmp_path: Path) -> None:
    (tmp_path / "proxy").mkdir()
    (tmp_path / "proxy" / "__init__.py").write_text("main = print\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from tokengrove.commands import main; main()"
    )
    arguments = [command, "check"] if command == "db" else [command, "--model", "x"]
    done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tokengrove: ") and done.stderr.count("\n") == 1
    assert f"{tmp_path}/proxy/__init__.py is in the way of the server's package `proxy`" in done.stderr


def test_the_help_lists_the_commands_of_a_server_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "proxy.py").write_text("raise ImportError('not today')\n")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from tokengrove.commands import main; main()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert all(name in done.stdout for name in ("serve", "rollout", "show"))
    assert "not installed" in done.stdout and "not today" in done.stdout


def test_an_application_is_built_of_settings_by_name(tmp_path: Path) -> None:
    app = testing.build_app(engine="scripted", database_url=f"sqlite:///{tmp_path}/some.db", engine_arg="tokens=3")
    with Client(app=app) as client, client.session("one") as session:
        assert session.api_key


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^engin is no setting of the server; did you mean engine\?$"):
        testing.build_app(engin="scripted")
    with pytest.raises(ConfigurationError, match=r"^port must be an integer$"):
        testing.build_app(port="many")


def test_a_server_serves_while_the_block_runs(tmp_path: Path) -> None:
    with testing.serving(engine="scripted", port=0, database_url=f"sqlite:///{tmp_path}/some.db") as url:
        assert httpx.get(f"{url}/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_contract_of_engines_has_the_definitions_of_the_server() -> None:
    assert tokengrove.engine.EngineInfo is EngineInfo
    assert {name: getattr(tokengrove.engine, name) for name in tokengrove.engine.__all__}.keys() == set(
        tokengrove.engine.__all__
    )
    with pytest.raises(AttributeError, match="nothing"):
        tokengrove.engine.nothing  # noqa: B018
