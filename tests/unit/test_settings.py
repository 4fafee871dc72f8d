"""Settings: flags, variables, the settings page and the code agree; invalid values are refused in one line."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy import commands
from proxy.errors import ConfigurationError
from proxy.settings import VARIABLE_PREFIX, Settings, from_environment
from proxy.types import Credit

ROOT = Path(__file__).resolve().parents[2]
NAMES = [spec.name for spec in fields(Settings)]


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_a_flag_a_variable_and_a_row_of_the_settings_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    text = CliRunner().invoke(commands.app, ["serve", "--help"]).output
    assert f"--{name.replace('_', '-')}" in text
    assert VARIABLE_PREFIX + name.upper() in text
    assert len(_rows(name)) == 1


@pytest.mark.parametrize("spec", fields(Settings), ids=lambda spec: spec.name)
def test_the_settings_page_shows_the_default(spec: Field[object]) -> None:
    [shown] = _rows(spec.name)
    match spec.default:
        case None | ():
            assert not re.fullmatch(r"[\d.]+|on|off", shown)
        case bool():
            assert shown == ("on" if spec.default else "off")
        case float() | int():
            assert float(shown) == spec.default
        case _:
            assert shown == spec.default


def _rows(name: str) -> list[str]:
    """The defaults in the rows of the settings page that begin with the setting's flag."""
    text = (ROOT / "docs" / "settings.md").read_text()
    return re.findall(rf"^\| `--{name.replace('_', '-')}` \| (.*?) \|", text, re.M)


@pytest.mark.parametrize("command", ["serve", "export", "demo", "doctor", "import"])
def test_help_cuts_no_name_on_a_narrow_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(commands.app, [command, "--help"]).output
    assert "--help" in text
    assert "…" not in text and not re.search(r"\w\.\.\.\s", text)
    assert max(map(len, text.splitlines())) <= 80


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    environ = {"TOKENGROVE_PORT": "1", "TOKENGROVE_CREDIT": "linear", "TOKENGROVE_REQUIRE_KEY": "true"}
    settings = from_environment({"port": 2}, environ)
    assert (settings.port, settings.credit, settings.require_key, settings.host) == (
        2,
        Credit.LINEAR,
        True,
        "127.0.0.1",
    )


def test_empty_entries_of_a_list_variable_are_left_out() -> None:
    assert from_environment({}, {"TOKENGROVE_ENGINE_ARG": "a=1;;b=2;"}).engine_arg == ("a=1", "b=2")


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("PORT", "many", "an integer"),
        ("PORT", "", "an integer"),
        ("BATCH_SIZE", "1.5", "an integer"),
        ("ENGINE_TIMEOUT_S", "long", "a number"),
        ("MIGRATE", "maybe", "true or false"),
        ("CREDIT", "debit", "tree or linear"),
    ],
)
def test_an_invalid_variable_is_named_with_its_valid_values(name: str, text: str, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^TOKENGROVE_{name}={text!r} is not {kind}"):
        from_environment({}, {f"TOKENGROVE_{name}": text})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"host": "0.0.0.0"}, "admin-key"),
        ({"port": 70000}, "--port"),
        ({"discount": 1.5}, "--discount"),
        ({"rewards_by": "anyone"}, "--rewards-by"),
        ({"max_body_bytes": 0}, "--max-body-bytes"),
        ({"max_inflight_body_bytes": 100, "max_body_bytes": 60}, "--max-inflight-body-bytes 100.*--max-body-bytes 60"),
        ({"max_body_values": 0}, "--max-body-values"),
        ({"shutdown_timeout_s": -1.0}, "--shutdown-timeout-s"),
        ({"pause_timeout_s": -1.0}, "--pause-timeout-s"),
        ({"max_staleness": -1, "batch_size": 4}, "--max-staleness"),
        ({"workers": 0}, "--workers"),
        ({"workers": 2, "engine": "scripted"}, "--workers 2.*--database-url postgresql://"),
        *(
            ({"workers": 2, "engine": engine, "database_url": "postgresql://h/d"}, "--workers 2.*--engine http://")
            for engine in ("auto", "transformers", "sglang", "package.module:Class")
        ),
    ],
)
def test_an_invalid_setting_is_refused_by_its_flag(given: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        Settings(**given)  # type: ignore[arg-type]
