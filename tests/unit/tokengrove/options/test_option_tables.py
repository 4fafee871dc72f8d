"""An option is declared once: parsers, flags, the client and the documents have what the declaration says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from proxy.api.option_body import read_group
from supply import option_tables
from tokengrove.commands.signatures import described
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.options.export import Baseline
from tokengrove.options.option import option, options_of
from tokengrove.options.values import read_text, read_value

ROOT = Path(__file__).resolve().parents[4]
DECLARATION = '    temper: int = option(3, "Hardness of the steel.", least=1, most=9, panel=SAMPLES, tokens=True)\n'
USE = """
from proxy.api.export_request import parse_export, parse_token_options
from tokengrove.client.options import SampleOptions, TokenOptions
from tokengrove.commands.export_flags import export_body, run_export_flags
from tokengrove.errors import InvalidRequest
assert parse_export({}).options.temper == 3
assert parse_export(export_body({"temper": 5})).options.temper == 5
assert parse_token_options({"temper": "7"}).temper == 7
assert "temper" in run_export_flags()
assert "temper" in SampleOptions.__annotations__ and "temper" in TokenOptions.__annotations__
try:
    parse_export({"temper": 10})
except InvalidRequest as error:
    print(error.message)
"""


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int | None = option(None, "A size.", least=1)


@dataclass(frozen=True, kw_only=True)
class Group:
    flag: bool = option(False, "A switch.")
    whole: int | None = option(None, "A number.", least=0, most=9)
    share: float = option(0.5, "A number.", above=0, most=1)
    text: str | None = option(None, "A text.")
    word: Baseline | None = option(None, "A word.", otherwise="the session's")
    literal: Literal["a", "b"] = option("a", "A word.")
    listed: str = option("x", "x or y.", choices=("x", "y"))
    names: tuple[str, ...] = option((), "Texts.")
    words: frozenset[str] | None = option(None, "Texts.")
    modes: frozenset[Baseline] = option(frozenset(), "Words.")
    pairs: Mapping[str, Any] = option({}, "Pairs.")
    inner: Inner = option(Inner(), "An object.")
    plain: int = 0


OPTIONS = options_of(Group)


def test_the_client_and_the_pages_are_as_the_code_makes_them() -> None:
    assert option_tables.client_options() == option_tables.CLIENT.read_text(encoding="utf-8")
    for path, text in option_tables.pages().items():
        assert text == path.read_text(encoding="utf-8"), f"run `python -m supply.option_tables`: {path.name}"


def test_a_changed_option_is_found_in_the_written_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "options.py"
    changed.write_text(option_tables.CLIENT.read_text(encoding="utf-8").replace("pad_token_id: int", "pad_id: int"))
    monkeypatch.setattr(option_tables, "CLIENT", changed)
    monkeypatch.setattr("sys.argv", ["option_tables", "--check"])
    assert option_tables.main() == 1


@pytest.mark.parametrize(
    ("page", "row"),
    [
        ("PAGE", "| edit | `clear_tool_uses_20250919`, `compact_20260112` | refused |"),
        ("SETTINGS", "| `--port` | 8080 |"),
        ("MONITORING", "| `tokengrove_in_flight` | gauge |"),
    ],
)
def test_a_row_that_the_code_does_not_make_is_found_in_a_page(
    page: str, row: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = getattr(option_tables, page).read_text(encoding="utf-8")
    assert row in text
    (changed := tmp_path / "page.md").write_text(text.replace(row, row.upper()), encoding="utf-8")
    monkeypatch.setattr(option_tables, page, changed)
    monkeypatch.setattr("sys.argv", ["option_tables", "--check"])
    assert option_tables.main() == 1


def test_a_new_option_of_an_export_is_one_line(tmp_path: Path) -> None:
    """Its parser, flags, keywords and rows of the documents follow; only the code that obeys it is to be written."""
    for name in ("proxy", "tokengrove", "docker", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "static", "vendor"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    declared = tmp_path / "tokengrove" / "options" / "export.py"
    before = "    step_advantages: Baseline | None = option("
    declared.write_text(declared.read_text(encoding="utf-8").replace(before, DECLARATION + before), encoding="utf-8")
    for words in (["-m", "supply.option_tables"], ["-c", USE], ["-m", "tokengrove", "export", "--help"]):
        ran = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={"PYTHONPATH": f"{tmp_path}:{tmp_path / 'docker'}", "PATH": "/usr/bin:/bin", "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        if words[0] == "-c":
            assert ran.stdout.strip() == "'temper' must be between 1 and 9, not 10"
    assert "--temper" in ran.stdout and "Hardness of the steel. Default: 3." in ran.stdout
    row = "| `temper` | 1 to 9 | `3` | Hardness of the steel. |"
    assert row in (tmp_path / "docs" / "http-api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ({"flag": True}, Group(flag=True)),
        ({"whole": 9, "text": None}, Group(whole=9)),
        ({"whole": 5.0}, Group(whole=5)),
        ({"share": 1}, Group(share=1.0)),
        ({"word": "grpo", "literal": "b"}, Group(word=Baseline.GRPO, literal="b")),
        ({"modes": "grpo"}, Group(modes=frozenset({Baseline.GRPO}))),
        ({"names": ["a"], "words": "b"}, Group(names=("a",), words=frozenset({"b"}))),
        ({"pairs": {"a": 1}, "inner": {"size": 2}}, Group(pairs={"a": 1}, inner=Inner(size=2))),
    ],
)
def test_a_body_is_read_by_the_types_of_its_options(body: dict[str, Any], value: Group) -> None:
    assert read_group(Group, body) == value


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"flag": 1}, "flag", "must be true or false"),
        ({"whole": 10}, "whole", "between 0 and 9"),
        ({"whole": True}, "whole", "an integer"),
        ({"share": "1"}, "share", "a number"),
        ({"share": 0}, "share", "must be more than 0 and at most 1, not 0"),
        ({"listed": "z"}, "listed", "must be one of x, y, not 'z'"),
        ({"modes": ["best"]}, "modes", "must contain only grpo, leave_one_out"),
        ({"text": "a\0b"}, "text", "NUL"),
        ({"word": "best"}, "word", "one of grpo, leave_one_out"),
        ({"literal": "c"}, "literal", "one of a, b"),
        ({"names": "a"}, "names", "an array"),
        ({"names": [1]}, "names[0]", "a string"),
        ({"inner": {"size": 0}}, "inner.size", "must be at least 1, not 0"),
        ({"inner": {"sice": 0}}, "inner.sice", "did you mean 'inner.size'?"),
        ({"plain": 1}, "plain", "is unknown"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_the_path_of_its_field(
    body: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_group(Group, body)
    assert refused.value.param == field
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("flag", "YES", True),
        ("whole", "7", 7),
        ("share", "0.25", 0.25),
        ("names", "a;;b", ("a", "b")),
        ("text", "1", "1"),
    ],
)
def test_a_text_is_read_by_the_type_of_its_option(name: str, text: str, value: object) -> None:
    assert read_text(OPTIONS[name], text) == value


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [("names", ["a"], ("a",)), ("share", 1, 1.0), ("word", "grpo", Baseline.GRPO), ("pairs", {"a": [1]}, {"a": [1]})],
)
def test_a_value_of_a_file_is_read_by_the_type_of_its_option(name: str, given: object, value: object) -> None:
    assert read_value(OPTIONS[name], given) == value


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("flag", 1, "true or false"),
        ("whole", True, "an integer"),
        ("whole", 1.0, "an integer"),
        ("text", 5, "a text"),
        ("word", "best", "grpo or leave_one_out"),
        ("names", "a", "a list, each a text"),
        ("names", [1], "a list, each a text"),
        ("pairs", [], "a mapping"),
    ],
)
def test_a_value_of_another_type_is_told_what_is_expected(name: str, given: object, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}$"):
        read_value(OPTIONS[name], given)


def test_a_number_is_a_text_only_where_it_may_be() -> None:
    assert read_value(OPTIONS["text"], 5, numbers=True) == "5"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("whole", 10, "--whole must be between 0 and 9, not 10"),
        ("whole", "x", "--whole must be a number, not 'x'"),
        ("share", 0.0, "--share must be more than 0 and at most 1, not 0"),
        ("share", float("nan"), "--share must be a finite number, not nan"),
        ("listed", "z", "--listed must be one of x, y, not 'z'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_flag(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{message}$"):
        OPTIONS[name].check(value)


def test_a_value_within_bounds_is_taken() -> None:
    for name, value in {"whole": None, "share": 1.0, "listed": "y", "names": ("any",)}.items():
        OPTIONS[name].check(value)


@pytest.mark.parametrize(
    ("name", "help"),
    [
        ("flag", "A switch."),
        ("share", "A number. Default: 0.5."),
        ("word", "A word (grpo or leave_one_out). Default: the session's."),
        ("listed", "x or y. Default: x."),
        ("words", "Texts. Repeatable."),
        ("pairs", "Pairs. NAME=VALUE; repeatable."),
    ],
)
def test_the_help_has_the_words_and_the_default(name: str, help: str) -> None:
    assert described(OPTIONS[name]) == help
