"""Tables of the docs that the code decides: errors, fields, types, reasons, metrics, events of the log, settings.

Each function returns the lines of one table, for `supply.option_tables`, which writes them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import TypeVar

from proxy.commands.settings_flags import HEADINGS
from proxy.protocols import openai_types
from proxy.protocols.chat import protocol as chat
from proxy.protocols.completions import protocol as completions
from proxy.protocols.google import contents, tools
from proxy.protocols.google import protocol as google
from proxy.protocols.messages import accepted_types as anthropic_types
from proxy.protocols.messages import protocol as messages
from proxy.protocols.responses import protocol as responses
from proxy.settings import Settings
from proxy.telemetry.families import Counts, Family, Gauge, Group, Histogram
from proxy.telemetry.metrics import Metrics
from supply.log_events import events
from tokengrove.errors import ProxyError, classes_by
from tokengrove.options.option import Option, options_of
from tokengrove.reasons import Explained

_Treated = TypeVar("_Treated", anthropic_types.Row, openai_types.Treatment)
_SENTENCE = re.compile(r"(?<=\.)\s")
_TYPES: Mapping[type[Family], str] = {Counts: "counter", Gauge: "gauge", Histogram: "histogram"}


def errors() -> Iterator[str]:
    """The codes of errors with their status and, as their cause, the first sentence of the docstring of their class."""
    yield from _head("code", "status", "cause")
    served = (kind for kind in classes_by("code").values() if kind.__module__ == ProxyError.__module__)
    for kind in sorted(served, key=lambda kind: kind.status):  # the client's own errors are never answers
        cause = "A bug of the server." if kind is ProxyError else _SENTENCE.split(inspect.getdoc(kind) or "", 1)[0]
        yield _row(f"`{kind.code}`", str(kind.status), " ".join(cause.split()))


def fields() -> Iterator[str]:
    """The fields of requests of each API, by treatment."""
    yield from _head("API", "treatment", "fields")
    treatments = ("honoured", "ignored", "refused")
    apis = {"chat completions": chat, "completions": completions, "responses": responses, "messages": messages}
    rows = {name: (api.HONOURED, api.IGNORED, api.REFUSED) for name, api in {**apis, "google": google}.items()}
    rows["google, `generationConfig`"] = (google.CONFIG, google.IGNORED_CONFIG, google.REFUSED_CONFIG)
    for name, of_api in rows.items():
        for treatment, names in zip(treatments, of_api, strict=True):
            yield _row(name, treatment, _listed(sorted(names)))


def google_types() -> Iterator[str]:
    """The parts and tools of Google's API, by treatment."""
    yield from _head("what", "treatment", "types")
    yield _row("part", "parsed", _listed(sorted(contents.PARSED_PARTS)))
    yield _row("field of a part", "parsed", _listed(sorted(contents.MODIFIERS)))
    yield _row("field of a part", "ignored", _listed(sorted(contents.IGNORED_MODIFIERS)))
    yield _row("part", "refused", _listed(sorted(contents.REFUSED_PARTS)))
    yield _row("tool", "parsed", _listed([tools.FUNCTIONS]))
    yield _row("tool", "ignored", _listed(sorted(tools.HOSTED_TOOLS)))
    yield _row("tool", "refused", _listed(sorted(tools.REFUSED_TOOLS)))


def messages_types() -> Iterator[str]:
    """The blocks, sources, tools and edits of Anthropic's API, by treatment."""
    tables: Mapping[str, Mapping[str, anthropic_types.Row]] = {
        "block": anthropic_types.BLOCKS,
        "source": {f"{kind}` of `{block}": row for (block, kind), row in anthropic_types.SOURCES.items()},
        "tool": anthropic_types.TOOLS,
        "edit": anthropic_types.EDITS,
    }
    yield from _head("what", "type", "treatment", "how")
    for what, table in tables.items():
        for row, names in _grouped(table).items():
            yield _row(what, _listed(names), row.treatment, row.how)


def openai_api_types() -> Iterator[str]:
    """The input items, content parts and tools of OpenAI's APIs, by treatment."""
    tables: Mapping[str, Mapping[str, openai_types.Treatment]] = {
        "input items": openai_types.ITEMS,
        "content parts": openai_types.PARTS,
        "tools": openai_types.TOOLS,
        "content parts of a chat": openai_types.CHAT_PARTS,
        "tools of a chat": openai_types.CHAT_TOOLS,
    }
    yield from _head("", "treatment", "types")
    for what, table in tables.items():
        for treatment, names in _grouped(table).items():
            yield _row(what, treatment, _listed(names))


def words(of: Iterable[Explained], *head: str) -> Iterator[str]:
    """Words, each with its meaning. `head`: the names of the two columns."""
    yield from _head(*head)
    for word in of:
        yield _row(f"`{word}`", word.meaning)


def metrics() -> Iterator[str]:
    """All metrics, in a table for each group."""
    known = Metrics()
    groups: Mapping[str, Group] = {
        "Requests": known.http,
        "Turns": known.turns,
        "Engine": known.engine,
        "Sessions and the training queue": known.sessions,
        "Store": known.store,
        "Exports": known.exports,
        "Process": known.process,
    }
    for number, (name, group) in enumerate(groups.items()):
        yield from ("\n" * (number > 0) + f"**{name}**\n", "\n")
        yield from _head("metric", "type", "labels", "meaning")
        for family in group.families():
            yield _row(f"`{shown_name(family)}`", _TYPES[type(family)], _listed(family.labels), family.text)


def log_events() -> Iterator[str]:
    """All events of the log, with their levels and fields."""
    yield from _head("event", "level", "fields")
    for name, event in events().items():
        yield _row(f"`{name}`", ", ".join(event.levels) or "see below", " ".join(f"`{each}`" for each in event.fields))


def settings() -> Iterator[str]:
    """All settings, in a table for each heading of `tokengrove serve --help`."""
    known = options_of(Settings)
    for number, heading in enumerate(dict.fromkeys(HEADINGS.values())):
        yield from ("\n" * (number > 0) + f"## {heading}\n", "\n")
        yield from _head("flag", "default", "meaning")
        for name in (name for name, under in HEADINGS.items() if under == heading):
            setting = known[name]
            text = setting.help.replace("*", "\\*")
            yield _row(f"`{setting.flag}`", _default(setting), f"{text} {setting.about.get('note', '')}".strip())


def _default(setting: Option) -> str:
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return setting.default_text or "none"


def shown_name(family: Family) -> str:
    """The name under which Prometheus shows a family."""
    return f"{family.name}_total" if isinstance(family, Counts) else family.name


def _grouped(table: Mapping[str, _Treated]) -> dict[_Treated, list[str]]:
    found: dict[_Treated, list[str]] = {}
    for name, treated in table.items():
        found.setdefault(treated, []).append(name)
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _head(*columns: str) -> Iterator[str]:
    yield _row(*columns)
    yield "|" + "---|" * len(columns) + "\n"


def _row(*cells: str | StrEnum) -> str:
    return "| " + " | ".join(cells) + " |\n"
