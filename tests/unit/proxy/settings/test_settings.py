"""Settings: flags, variables, the settings page and the code agree; invalid values are refused in one line."""

from __future__ import annotations

import re
from dataclasses import Field, fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.commands.settings_flags import FIRST, HEADINGS
from proxy.settings import VARIABLE_PREFIX, Settings, read_settings
from proxy.settings.kinds import masked
from tokengrove import commands
from tokengrove.errors import ConfigurationError
from tokengrove.options.option import flag_of
from tokengrove.options.session import Credit

ROOT = Path(__file__).resolve().parents[4]
NAMES = [spec.name for spec in fields(Settings)]


def test_every_setting_is_a_flag_a_variable_and_a_row_of_the_settings_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    text = CliRunner().invoke(commands.app, ["serve", "--help"]).output
    wrong = [name for name in NAMES if f"--{name.replace('_', '-')}" not in text]
    wrong += [name for name in NAMES if len(_rows(name)) != 1]
    assert not wrong, wrong
    assert f"{VARIABLE_PREFIX}MAX_CONNECTIONS" in text


def test_help_has_the_headings_of_the_settings_page_after_what_most_people_set() -> None:
    page = (ROOT / "docs" / "settings.md").read_text().split("\n## ")
    headings = {flag: part.split("\n")[0] for part in page for flag in re.findall(r"^\| `(--[a-z-]+)`", part, re.M)}
    shown = {flag_of(name): heading for name, heading in HEADINGS.items()}
    assert {flag: headings[flag] for flag, heading in shown.items() if heading not in (FIRST, headings[flag])} == {}
    assert shown.keys() == headings.keys()
    lines = CliRunner().invoke(commands.app, ["serve", "--help"]).output.splitlines()
    found = [line.removesuffix(":") for line in lines if re.fullmatch(r"[A-Z].*:", line)]
    assert found == ["Options", *dict.fromkeys(HEADINGS.values())]


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
    environ = {"TOKENGROVE_PORT": "1", "TOKENGROVE_CREDIT": "linear", "TOKENGROVE_MIGRATE": "true"}
    settings = read_settings({"port": 2}, environ)
    assert (settings.port, settings.credit, settings.migrate, settings.host) == (
        2,
        Credit.LINEAR,
        True,
        "127.0.0.1",
    )


def test_empty_entries_of_a_list_variable_are_left_out() -> None:
    assert read_settings({}, {"TOKENGROVE_ENGINE_ARG": "a=1;;b=2;"}).engine_arg == ("a=1", "b=2")


def test_an_empty_variable_is_none() -> None:
    """Compose files and manifests make such for what is not set."""
    environ = dict.fromkeys(["TOKENGROVE_MODEL", "TOKENGROVE_PORT", "TOKENGROVE_CONFIG", "TOKENGROVE_NO_SETTING"], "")
    assert read_settings({}, environ) == Settings()


@pytest.mark.parametrize("name", [spec.name for spec in fields(Settings) if spec.type in ("str", "str | None")])
def test_an_empty_text_is_refused_by_its_flag(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{flag_of(name)} is empty"):
        Settings(**{name: " "})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [spec.name for spec in fields(Settings) if "float" in str(spec.type)])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused_with_its_flag_and_its_variable(name: str, number: str) -> None:
    variable = f"TOKENGROVE_{name.upper()}"
    with pytest.raises(
        ConfigurationError,
        match=rf"^{flag_of(name)} must be a finite number, not {number} .*{flag_of(name)} is {variable}\)",
    ):
        read_settings({}, {variable: number})


@pytest.mark.parametrize(
    "url", ["https://rollouts.example.org", "http://[::1]:8080", "https://example.org/rollouts/a/"]
)
def test_a_public_url_may_have_a_port_and_a_path(url: str) -> None:
    assert Settings(public_url=url).public_url == url


@pytest.mark.parametrize(
    ("variable", "word"),
    [
        ("TOKENGROVE_PROT", "did you mean TOKENGROVE_PORT?"),
        ("TOKENGROVE_ADMINKEY", "did you mean TOKENGROVE_ADMIN_KEY?"),
        ("TOKENGROVE_port", "did you mean TOKENGROVE_PORT?"),
        ("TOKENGROVE_CONFIG_FILE", "did you mean TOKENGROVE_CONFIG?"),
        ("TOKENGROVE_QQ", "serve --help` lists"),
        ("TOKENGROVE_PORT_8080", "did you mean TOKENGROVE_PORT?"),
    ],
)
def test_a_variable_that_is_no_setting_is_refused_with_the_nearest(variable: str, word: str) -> None:
    with pytest.raises(ConfigurationError, match=f"variable {variable} is no setting.*{re.escape(word)}") as refused:
        read_settings({}, {variable: "secret"})
    assert "secret" not in str(refused.value)


def test_the_variables_of_a_kubernetes_service_are_neither_settings_nor_errors() -> None:
    """As Kubernetes sets them for Services named `tokengrove` and `tokengrove-db` in the namespace of the container."""
    environ = {
        "TOKENGROVE_SERVICE_HOST": "10.0.0.1",
        "TOKENGROVE_SERVICE_PORT": "80",
        "TOKENGROVE_SERVICE_PORT_HTTP_API": "80",
        "TOKENGROVE_PORT": "tcp://10.0.0.1:80",
        "TOKENGROVE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "TOKENGROVE_PORT_80_TCP_PROTO": "tcp",
        "TOKENGROVE_PORT_80_TCP_PORT": "80",
        "TOKENGROVE_PORT_80_TCP_ADDR": "10.0.0.1",
        "TOKENGROVE_DB_SERVICE_HOST": "10.0.0.2",
        "TOKENGROVE_DB_PORT": "tcp://10.0.0.2:5432",
        "TOKENGROVE_DB_PORT_5432_TCP_ADDR": "10.0.0.2",
    }
    assert read_settings({}, environ) == Settings()
    assert read_settings({"port": 9000}, environ).port == 9000


def test_variables_of_the_tests_are_no_errors() -> None:
    assert read_settings({}, {"TOKENGROVE_TEST_ASSETS": "/somewhere"}) == Settings()


@pytest.mark.parametrize(
    "name", [spec.name for spec in fields(Settings) if spec.name.endswith("_key") and "str" in str(spec.type)]
)
def test_every_key_is_masked(name: str) -> None:
    assert masked(name, "s3cret") == "***"


@pytest.mark.parametrize(
    ("host", "key", "weak"),
    [
        ("127.0.0.1", "k" * 15, True),
        ("localhost", f"{'k' * 16},short", True),
        ("::1", f"short,{'k' * 16}", True),
        ("127.0.0.1", "k" * 16, False),
        ("127.0.0.1", None, False),
    ],
)
def test_a_short_key_is_warned_of_on_loopback(host: str, key: str | None, weak: bool) -> None:
    warning = Settings(host=host, admin_key=key).weak_key
    assert (warning is not None) == weak
    assert warning is None or str(key) not in warning


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "grove.example"])
@pytest.mark.parametrize("key", ["k" * 15, f"{'k' * 16},short", f"short,{'k' * 16}"])
def test_a_short_key_is_refused_beyond_loopback_with_the_way_out(host: str, key: str) -> None:
    with pytest.raises(ConfigurationError, match=r"fewer than 16 characters.*openssl rand -hex 32") as raised:
        Settings(host=host, admin_key=key)
    assert key not in str(raised.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_long_keys_are_taken_beyond_loopback(host: str) -> None:
    assert Settings(host=host, admin_key=f"{'n' * 16},{'o' * 16}").weak_key is None


def test_passwords_and_keys_within_settings_are_masked() -> None:
    assert masked("database_url", "postgresql://u:p@w/d@h/db") == "postgresql://u:***@h/db"
    assert masked("database_url", "postgresql://h/db?user=u&password=p") == "postgresql://h/db?user=u&password=***"
    assert masked("database_url", "postgresql://h/db?sslpassword=p&a=b") == "postgresql://h/db?sslpassword=***&a=b"
    assert masked("database_url", "postgresql://u@h/db") == "postgresql://u@h/db"
    assert masked("engine_arg", ("api_key=a=b", "kind=sglang")) == ("api_key=***", "kind=sglang")


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("PORT", "many", "an integer"),
        ("BATCH_SIZE", "1.5", "an integer"),
        ("ENGINE_TIMEOUT_S", "long", "a number"),
        ("MIGRATE", "maybe", "true or false"),
        ("CREDIT", "debit", "tree or linear"),
    ],
)
def test_an_invalid_variable_is_named_with_its_valid_values(name: str, text: str, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^TOKENGROVE_{name}={text!r} is not {kind}"):
        read_settings({}, {f"TOKENGROVE_{name}": text})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"host": "0.0.0.0"}, "admin-key"),
        ({"host": "http://127.0.0.1"}, "--host 'http://127.0.0.1'.*--port"),
        ({"host": "127.0.0.1:80", "admin_key": "k"}, "--host '127.0.0.1:80'.*--port"),
        ({"require_key": True}, "--require-key has no effect without --admin-key"),
        ({"key_lifetime_s": 60.0}, "--key-lifetime-s has no effect without --admin-key"),
        ({"max_tokens_per_turn": 9, "max_context_tokens": 8}, "--max-tokens-per-turn 9.*--max-context-tokens 8"),
        *(
            ({"public_url": url}, re.escape(f"--public-url {url!r} is not a URL such as https://"))
            for url in (
                *("foo", "foo:8080", "//foo", "ftp://foo", "http://", "http://foo:port", "http://foo:0", "http://[::1"),
                *("http://user:word@foo", "http://foo?a=1", "http://foo/x#y", "http://foo/a b"),
            )
        ),
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
