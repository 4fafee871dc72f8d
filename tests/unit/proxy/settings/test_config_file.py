"""The configuration file: flags over variables over file over default; each error names file, line, key and way out."""

from __future__ import annotations

import os
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.models.declared import read_models
from proxy.settings import Settings
from proxy.settings.sources import read_settings, read_sources
from tokengrove import commands
from tokengrove.errors import ConfigurationError
from tokengrove.options.session import Credit


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tokengrove.toml"


def test_a_flag_wins_over_its_variable_that_over_the_file_and_that_over_the_default(file: Path) -> None:
    file.write_text("port = 1\nbatch_size = 1\nmax_staleness = 0\ndiscount = 1\n")
    environ = {"TOKENGROVE_PORT": "2", "TOKENGROVE_BATCH_SIZE": "2"}
    sources = read_sources({"port": 3, "host": None}, environ, config=file)
    found = sources.settings
    assert (found.port, found.batch_size, found.max_staleness, found.host) == (3, 2, 0, "127.0.0.1")
    assert sources.origins == {
        "port": "--port",
        "batch_size": "TOKENGROVE_BATCH_SIZE",
        "max_staleness": f"max_staleness in {file}, line 3",
        "discount": f"discount in {file}, line 4",
    }


def test_each_kind_of_value_is_read(file: Path) -> None:
    file.write_text(
        'engine = "scripted"\nengine_arg = ["play=babble", "tokens=3"]\nmigrate = false\ncredit = "linear"\n'
        "engine_timeout_s = 5\nport = 0\n"
    )
    found = read_settings({}, {}, config=file)
    assert found == Settings(
        engine="scripted",
        engine_arg=("play=babble", "tokens=3"),
        migrate=False,
        credit=Credit.LINEAR,
        engine_timeout_s=5.0,
        port=0,
    )
    assert type(found.engine_timeout_s) is float


def test_a_variable_names_the_file_and_the_flag_wins(file: Path) -> None:
    file.write_text("port = 1\n")
    environ = {"TOKENGROVE_CONFIG": str(file)}
    assert read_settings({}, environ).port == 1
    assert read_settings({}, {**environ, "TOKENGROVE_CONFIG": "nowhere"}, config=file).port == 1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("\nprot = 1", "prot in {file}, line 2 is no setting; did you mean port?"),
        (
            "max-turns-in-flight = 1",
            "max-turns-in-flight in {file}, line 1 is no setting; did you mean max_turns_in_flight?",
        ),
        ("qqqq = 1", "qqqq in {file}, line 1 is no setting"),
        ("port = '1'", "port in {file}, line 1 must be an integer"),
        ("port = true", "port in {file}, line 1 must be an integer"),
        ("# port = 1\nport = 1.0", "port in {file}, line 2 must be an integer"),
        ("require_key = 1", "require_key in {file}, line 1 must be true or false"),
        ("engine_timeout_s = '5'", "engine_timeout_s in {file}, line 1 must be a number"),
        ("model = 5", "model in {file}, line 1 must be a text"),
        ("admin_key = ['s3cret']", "admin_key in {file}, line 1 must be a text"),
        ("engine_arg = 'a=1'", "engine_arg in {file}, line 1 must be a list, each a text"),
        ("engine_arg = [1]", "engine_arg in {file}, line 1 must be a list, each a text"),
        ("credit = 'debit'", "credit in {file}, line 1 must be tree or linear"),
        ("x = 1\n\n[server]\nport = 1", "x in {file}, line 1 is no setting"),
        ("\n[server]\nport = 1", "server in {file}, line 2 is a table; only models may be one"),
        ("engine_timeout_s = nan", "--engine-timeout-s is engine_timeout_s in {file}, line 1"),
        ("port = 70000", "--port must be between 0 and 65535, not 70000 (--port is port in {file}, line 1)"),
        ("port = ", "--config {file} is not TOML: Invalid value (at end of document)"),
        ("port = 1\nport = 2\n", "--config {file} is not TOML: Cannot overwrite a value (at line 2"),
    ],
)
def test_a_mistake_is_refused_with_file_line_and_key(file: Path, text: str, word: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        read_settings({}, {}, config=file)
    assert word.format(file=file) in str(refused.value)
    assert "s3cret" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"--config {file} cannot be read: No such file"):
        read_settings({}, {}, config=file)
    file.write_bytes(b"model = '\xff'")
    with pytest.raises(ConfigurationError, match=f"--config {file} is not text in UTF-8"):
        read_settings({}, {}, config=file)


@pytest.mark.skipif(os.name != "posix", reason="files have other permissions here")
@pytest.mark.parametrize(
    ("text", "mode", "warns"),
    [
        ('admin_key = "k"', 0o644, True),
        ('admin_key = "k"', 0o640, True),
        ('admin_key = "k"', 0o600, False),
        ('database_url = "postgresql://u:p@h/d"', 0o604, True),
        ('database_url = "postgresql://u@h/d"', 0o644, False),
        ('engine_arg = ["admin_api_key=k"]', 0o644, True),
        ("port = 1", 0o644, False),
    ],
)
def test_a_secret_that_others_can_read_is_warned_of(file: Path, text: str, mode: int, warns: bool) -> None:
    file.write_text(text)
    file.chmod(mode)
    warning = read_sources({}, {}, config=file).warning
    assert (warning is not None) == warns
    assert warning is None or f"chmod 600 {file}" in warning


def test_print_config_prints_a_file_that_says_the_same_without_secrets(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("batch_size = 4\nmax_staleness = 1\n")
    monkeypatch.setenv("TOKENGROVE_ADMIN_KEY", "s3cret")
    flags = ("--config", str(file), "--port", "0", "--no-migrate", "--engine-arg", 'a="b"')
    done = CliRunner().invoke(commands.app, ["serve", "--print-config", *flags])
    assert done.exit_code == 0 and "s3cret" not in done.output
    lines = done.output.splitlines()
    assert f"batch_size = 4  # batch_size in {file}, line 1" in lines
    assert 'admin_key = "***"  # TOKENGROVE_ADMIN_KEY' in lines
    assert "port = 0  # --port" in lines and 'host = "127.0.0.1"  # default' in lines
    assert [line.removeprefix("# ").partition(" = ")[0] for line in lines] == [spec.name for spec in fields(Settings)]
    file.write_text(done.output)
    expected = Settings(batch_size=4, max_staleness=1, admin_key="***", port=0, migrate=False, engine_arg=('a="b"',))
    assert tomllib.loads(done.output)["engine_arg"] == ['a="b"']
    monkeypatch.delenv("TOKENGROVE_ADMIN_KEY")
    assert read_settings({}, {}, config=file) == expected


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_commands_of_the_database_read_it_from_the_file(file: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other settings need not fit: an address that needs a key of the server hinders no command of the database."""
    database = file.with_name("of-the-file.db")
    file.write_text(f'database_url = "sqlite:///{database}"\nhost = "0.0.0.0"\n')
    if by == "variable":
        monkeypatch.setenv("TOKENGROVE_CONFIG", str(file))
    flags = ("--config", str(file)) if by == "flag" else ()
    done = CliRunner().invoke(commands.app, ["db", "upgrade", *flags])
    assert done.exit_code == 0, done.output
    assert database.exists()


def test_the_tables_of_models_are_read_from_either_file(tmp_path: Path) -> None:
    tables = """
[models.policy]
[models.judge]
kind = "external"
url = "https://api.example.com/v1"
key_variable = "JUDGE_KEY"
max_turns = 3
"""
    environ = {"JUDGE_KEY": "sk-judge"}
    (tmp_path / "models.toml").write_text(tables)
    (tmp_path / "server.toml").write_text(f"port = 9000\n{tables}")
    of_server = read_settings({}, environ, config=tmp_path / "server.toml").models
    for source in (str(tmp_path / "models.toml"), of_server):
        policy, judge = read_models(source, environ)
        assert (policy.name, policy.of_server, judge.kind, judge.max_turns) == ("policy", True, "external", 3)
        assert judge.upstream is not None and judge.upstream.key == "sk-judge"
        assert "sk-judge" not in repr(judge)
    with pytest.raises(ConfigurationError, match="the variable JUDGE_KEY is not set"):
        read_models(of_server, {})
