"""The client's typed dicts, written from the options (`tokengrove.options`), and the tables of docs/http-api.md,
docs/monitoring.md and docs/settings.md, written from the options and from `supply.code_tables`.

`PYTHONPATH=docker python -m supply.option_tables` writes them, and with `--check` fails if they differ. What is written
stands between two marks; the rest of each file is written by hand.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_origin

from proxy.api.turn_json import OF_A_TURN, Part
from supply import code_tables
from tokengrove.options.claim import ClaimOptions
from tokengrove.options.export import (
    EXPORT_GROUPS,
    SAMPLE_GROUPS,
    ExportFormat,
    PageOptions,
    Teacher,
    TrainSelection,
    TurnSelection,
)
from tokengrove.options.option import Conditions, NumberCondition, Option, options_of
from tokengrove.options.session import ListingFilter, SessionFilter, StoredFilter
from tokengrove.options.start import EpisodeOptions, Limits, StartOptions, TurnOptions
from tokengrove.reasons import Differs, Note, TokenState

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "tokengrove" / "client" / "options.py"
PAGE, MONITORING, SETTINGS = (ROOT / "docs" / f"{name}.md" for name in ("http-api", "monitoring", "settings"))
_WRITTEN = "# Written by `PYTHONPATH=docker python -m supply.option_tables`: change tokengrove/options.\n"
_END = "# The end of what is written.\n"
_NAMES: Mapping[Any, str] = {TrainSelection: "Train", ExportFormat: "Format"}
"""Names of types in the client, where they have another one there."""
_TYPES: Mapping[Any, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    tuple[str, ...]: "Sequence[str]",
    Mapping[str, Any]: "Mapping[str, Json]",
    Mapping[str, str]: "Mapping[str, str]",
    Conditions: "Mapping[str, Json]",
    NumberCondition: "Number | Sequence[Number] | Mapping[str, Number]",
    TurnSelection | frozenset[int]: 'Literal["all", "last"] | Sequence[int]',
    tuple[Teacher, ...]: "Sequence[Teacher]",
    bool | Literal["auto"]: 'bool | Literal["auto"]',
}


_KINDS: Mapping[Any, str] = {
    bool: "true, false",
    str: "text",
    tuple[str, ...]: "a list of texts",
    Mapping[str, Any]: "an object",
    Mapping[str, str]: "an object of texts",
    Conditions: "an object of conditions",
    NumberCondition: "a number, a list of numbers or a range",
    TurnSelection | frozenset[int]: "`all`, `last`, a list of indexes",
    tuple[Teacher, ...]: "a list of objects",
    bool | Literal["auto"]: 'true, false, `"auto"`',
}
"""The values of a type in words."""
_WIDTH = 120


@dataclass(frozen=True)
class Written:
    """One typed dict: its name, its first line, its options, and the typed dict whose options it has too."""

    name: str
    about: str
    options: Mapping[str, Option]
    base: str = "TypedDict"


def typed_dicts() -> list[Written]:
    """The typed dicts of the client, each before those that have it as a value."""
    export, page = options_of(*EXPORT_GROUPS), options_of(PageOptions)
    samples = _without(options_of(*SAMPLE_GROUPS), "style")
    tokens = {name: each for name, each in export.items() if each.about.get("tokens")}
    return [
        Written("Limits", "The limits of a session.", options_of(Limits)),
        Written("EpisodeOptions", "Where the traffic at an address is cut into sessions.", options_of(EpisodeOptions)),
        Written("SessionOptions", "How to start a session.", _without(options_of(StartOptions), "task_id")),
        Written("Teacher", "A model that scores the trained tokens of samples.", options_of(Teacher)),
        Written("Train", "What to train; the rest stays in the samples as context.", options_of(TrainSelection)),
        Written(
            "SessionFilter",
            "Which sessions, turns and samples to select. A claim takes `purpose`, `agent` and the versions only "
            "together with `export`.",
            options_of(SessionFilter),
        ),
        Written("ListingFilter", "Which sessions to list.", options_of(ListingFilter)),
        Written("SampleOptions", "How samples are made and sent.", samples),
        Written("ExportOptions", "How to export.", _only(page, "route", "wait_s", "limit"), "SampleOptions"),
        Written("TokenOptions", 'The export that `include=["tokens"]` shows a turn in.', tokens),
        Written("ClaimOptions", "How to claim sessions.", _without(options_of(ClaimOptions), "filter")),
    ]


def client_options() -> str:
    """The text of the client's module of options."""
    text = CLIENT.read_text(encoding="utf-8")
    begin, end = text.index(_WRITTEN) + len(_WRITTEN), text.index(_END)
    written = [f"Format = {_literal(ExportFormat)}\n", *map(_class, typed_dicts())]
    return _formatted(text[:begin] + "\n\n".join(written) + "\n\n" + text[end:])


def pages() -> dict[Path, str]:
    """The text of each page with written tables."""
    tables: Mapping[Path, Mapping[str, Iterable[str]]] = {
        PAGE: _api_tables(),
        MONITORING: {"metrics": code_tables.metrics(), "events": code_tables.log_events()},
        SETTINGS: {"settings": code_tables.settings()},
    }
    return {path: _filled(path.read_text(encoding="utf-8"), those) for path, those in tables.items()}


def _filled(text: str, tables: Mapping[str, Iterable[str]]) -> str:
    for name, lines in tables.items():
        mark = f"<!-- options: {name}, written by supply.option_tables -->\n"
        begin = text.index(mark) + len(mark)
        end = text.index("<!-- end of the options -->\n", begin)
        text = text[:begin] + "\n" + "".join(lines) + "\n" + text[end:]
    return text


def _api_tables() -> dict[str, Iterable[str]]:
    return {
        **{name: _rows(options) for name, options in _options().items()},
        "errors": code_tables.errors(),
        "fields": code_tables.fields(),
        "types of Google's API": code_tables.google_types(),
        "types of Anthropic's API": code_tables.messages_types(),
        "types of OpenAI's APIs": code_tables.openai_api_types(),
        "parts of a session": code_tables.words([part for part in Part if part not in OF_A_TURN], "part", "adds"),
        "parts of a turn": code_tables.words(OF_A_TURN, "part", "adds"),
        "notes": code_tables.words(Note, "note", "value"),
        "differences": code_tables.words(Differs, "why", "cause"),
        "states": code_tables.words(TokenState, "state", "the token"),
    }


def _options() -> dict[str, Mapping[str, Option]]:
    return {
        "start": {**_without(options_of(StartOptions), *options_of(TurnOptions)), **options_of(TurnOptions)},
        "limits": options_of(Limits),
        "episodes": options_of(EpisodeOptions),
        "export": options_of(*EXPORT_GROUPS),
        "train": options_of(TrainSelection),
        "teacher": options_of(Teacher),
        "filter": options_of(SessionFilter),
        "listing": _without(options_of(ListingFilter), *options_of(StoredFilter)),
        "claim": options_of(ClaimOptions),
    }


def _class(written: Written) -> str:
    lines = [f"class {written.name}({written.base}, total=False):", *_wrapped(f'"""{written.about}'), ""]
    for name, each in written.options.items():
        lines += _wrapped(f"`{name}`: {_told(each)}", deeper="    ")
    lines += ['    """', ""]
    return "\n".join([*lines, *(f"    {name}: {_type(each)}" for name, each in written.options.items())]) + "\n"


def _wrapped(text: str, deeper: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent=f"    {deeper}")


def _told(option: Option) -> str:
    """The help of an option, with its unit and its default."""
    unit = f" In {option.about['unit']}." if "unit" in option.about else ""
    default = None if is_dataclass(option.kind) else option.default_text
    return f"{option.help}{unit}" + (f" Default: {default}." if default else "")


def _type(option: Option) -> str:
    kind = option.kind
    if kind in _TYPES:
        return _TYPES[kind]
    if get_origin(kind) is frozenset:
        return "str | Sequence[str]"
    if kind in _NAMES or is_dataclass(kind):
        return _NAMES.get(kind) or kind.__name__
    return _literal(option.choices)


def _literal(words: Iterable[str]) -> str:
    return f"Literal[{', '.join(repr(str(word)) for word in words)}]"


def _rows(options: Mapping[str, Option]) -> Iterator[str]:
    yield "| field | values | default | meaning |\n|---|---|---|---|\n"
    for name, each in options.items():
        note = f" {each.about['note']}" if "note" in each.about else ""
        yield f"| `{name}` | {_values(each)} | {_default(each)} | {each.help}{note} |\n"


def _values(option: Option) -> str:
    """The values that an option takes, in words."""
    kind, words = option.kind, ", ".join(f"`{word}`" for word in option.choices)
    if get_origin(kind) is frozenset:
        return f"a list of {words or 'texts'}, or one"
    if is_dataclass(kind):
        return "an object"
    return _KINDS.get(kind) or words or _range(option)


def _range(option: Option) -> str:
    """The bounds of a number, with its unit."""
    least, most = option.about.get("least"), option.about.get("most")
    if least is not None and most is not None:
        return f"{least:g} to {most:,.0f} {option.about.get('unit', '')}".rstrip()
    kind = "an integer" if option.kind is int else "a number"
    unit = f" of {option.about['unit']}" if "unit" in option.about else ""
    return f"{kind}{unit}" + ("" if least is None else f", at least {least:g}")


def _default(option: Option) -> str:
    text = "" if is_dataclass(option.kind) else option.default_text or ""
    if option.kind is bool and option.default is False:
        text = "false"
    return text if "otherwise" in option.about or not text else f"`{text}`"


def _without(options: Mapping[str, Option], *names: str) -> dict[str, Option]:
    return {name: each for name, each in options.items() if name not in names}


def _only(options: Mapping[str, Option], *names: str) -> dict[str, Option]:
    return {name: options[name] for name in names}


def _formatted(text: str) -> str:
    words = [sys.executable, "-m", "ruff", "format", "--quiet", "--stdin-filename", str(CLIENT), "-"]
    return subprocess.run(words, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def main() -> int:
    """Write the files, or check them."""
    wrong = []
    for path, text in {CLIENT: client_options(), **pages()}.items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            wrong.append(path)
    for path in wrong:
        print(f"{path} is not what the code makes: {__doc__}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
