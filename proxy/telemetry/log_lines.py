"""Records of the standard library's logging as lines: JSON for log collectors, or `pretty` for people.

No text of a client can begin a line or control a terminal: control characters and line ends are escaped in both
formats. A formatter returns a line for any record, cut to a length that a collector accepts.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from typing import Any

Value = str | int | float | bool
"""A value of a field in a line."""

_MOST_CHARACTERS = 300
_MOST_OF_TRACEBACK = 16_000
_SHORT = 100
_BARE = re.compile(r"[\w.:/+-]+", re.ASCII)
_SECRETS = re.compile(r"(?<=/~)[^/\s]+|(?<=~)[\w-]{20,}|\b[sc]k-[\w-]{20,}|(?<=://)[^/@\s]+(?=@)")
"""Secrets that an error of a library may quote: text after `~` in a path, keys of this server, and logins in URLs."""

# A quote that is not closed extends to the end. Searching for its end from each quote would take quadratic time.
_QUOTED = re.compile(r"""(?<!\w)b?(['"])((?:(?!\1)[^\\]|\\.)*)(?:\1|\\?\Z)""", re.DOTALL)
_WORD = re.compile(r"[\w.:/@+\[\]~-]{0,60}", re.ASCII)

_OWN = ("proxy.", "tokengrove.")
_LEVELS = {level: name for name, level in logging.getLevelNamesMapping().items() if name not in ("WARN", "FATAL")}
_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "31;1"}


class Line:
    """A line without a record of logging: what `LineFormatter` reads of a record. `args`: the fields, a dict."""

    __slots__ = ("args", "created", "levelname", "msg", "name")
    exc_info = None
    pathname, lineno = __file__, 0

    def getMessage(self) -> str:  # as in LogRecord
        """The event."""
        return self.msg

    def __init__(self, name: str, level: int, event: str, fields: dict[str, Any]) -> None:
        self.name, self.levelname, self.msg, self.args = name, _LEVELS[level], event, fields
        self.created = time.time()


Told = logging.LogRecord | Line
"""What becomes a line."""


class LineFormatter(logging.Formatter):
    """The base of both formats. `worker`: the number of this process among the workers of its server, or None."""

    worker: int | None = None

    def format(self, record: Told) -> str:
        """Return the line of a record."""
        try:
            return self.line(record, event_of(record), self._fields(record))
        except Exception as error:  # a malformed record must not end the writing thread
            told = f"a record of {record.pathname} could not be written: {type(error).__name__}"
            level = logging.getLevelNamesMapping().get(record.levelname, logging.ERROR)
            bare = logging.LogRecord(record.name, level, record.pathname, record.lineno, told, None, None)
            return self.line(bare, told, {})

    def line(self, record: Told, event: str, fields: Mapping[str, Value]) -> str:
        """Return a line."""
        raise NotImplementedError

    def traceback(self, record: Told) -> str | None:
        """Return the end of a record's traceback, if it has one."""
        if not record.exc_info or record.exc_info[0] is None:
            return None
        lines = self.formatException(record.exc_info).split("\n")
        # Lines of code and of locations are indented; the others are error messages.
        text = without_secrets("\n".join(line if line.startswith(" ") else without_texts(line) for line in lines))
        return text if len(text) <= _MOST_OF_TRACEBACK else f"...{text[-_MOST_OF_TRACEBACK:]}"

    def _fields(self, record: Told) -> dict[str, Value]:
        fields: dict[str, Value] = {} if self.worker is None else {"worker": self.worker}
        if type(record.args) is dict:
            for name, value in record.args.items():
                if value is None:
                    continue
                # Every turn logs a line, so numbers and short texts that cannot have a secret skip the call.
                if isinstance(value, str):
                    short = len(value) <= _SHORT and _BARE.fullmatch(value) is not None and "k-" not in value
                    fields[name] = value if short else plain(value)
                elif type(value) is float:
                    fields[name] = round(value, 6) if math.isfinite(value) else str(value)
                else:
                    fields[name] = value if type(value) is int else plain(value)
        return fields


class JsonLines(LineFormatter):
    """One JSON object per line, in ASCII: `time`, `level`, `logger`, `event`, the fields, and `traceback`."""

    def line(self, record: Told, event: str, fields: Mapping[str, Value]) -> str:
        head = {"time": moment(record), "level": record.levelname.lower(), "logger": record.name, "event": event}
        said = {**fields, **head}
        if record.exc_info and (traceback := self.traceback(record)) is not None:
            said["traceback"] = traceback
        return json.dumps({**head, **said})


class PrettyLines(LineFormatter):
    """`TIME level event name=value ...`, followed by an indented traceback. `colour`: colour the levels."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def line(self, record: Told, event: str, fields: Mapping[str, Value]) -> str:
        level = record.levelname.lower()
        shown = f"{level:7}"
        if self._colour and level in _COLOURS:
            shown = f"\x1b[{_COLOURS[level]}m{shown}\x1b[0m"
        named = str(record.msg)
        parts = []
        for name, value in fields.items():
            if f"%({name})" not in named:
                bare = _BARE.fullmatch(value) if isinstance(value, str) else not isinstance(value, bool)
                parts.append(f"{name}={value if bare else json.dumps(value)}")
        if not record.name.startswith(_OWN):
            parts.append(f"logger={record.name}")
        text = " ".join([event, *parts])
        lines = [f"{moment(record)} {shown} {text if text.isprintable() else printable(text)}"]
        if record.exc_info and (traceback := self.traceback(record)) is not None:
            lines += [f"    | {printable(line)}" for line in traceback.split("\n")]
        return "\n".join(lines)


def event_of(record: Told) -> str:
    """The event name of a record, or its message if it has none."""
    message = record.msg
    if type(record.args) is dict:
        if not isinstance(message, str) or "%" not in message:
            return str(message)
        return message % {name: None if value is None else plain(value) for name, value in record.args.items()}
    return cut(without_secrets(record.getMessage()), 4 * _MOST_CHARACTERS)


def plain(value: Any) -> Value:
    """The value as a field of a line: a number, or a text cut to a maximum length."""
    if isinstance(value, str):
        return cut(without_secrets(value), _MOST_CHARACTERS)
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    try:
        return plain(json.dumps(value, separators=(",", ":"), default=str))
    except RecursionError:  # orjson reads deeper JSON than Python writes
        return "nested too deeply"


def cut(text: str, most: int) -> str:
    """The first `most` characters of a text, with `...` if it is longer."""
    return text if len(text) <= most else f"{text[:most]}..."


def without_secrets(text: str) -> str:
    """A text with everything that looks like a secret replaced by `...`."""
    return _SECRETS.sub("...", text) if "~" in text or "k-" in text or "://" in text else text


def without_texts(message: str) -> str:
    """An error message without the texts that it quotes, except single words such as names of fields, types and tools.

    The client, which has sent the texts, gets the whole message.
    """
    return _QUOTED.sub(
        lambda quoted: quoted[0] if _WORD.fullmatch(quoted[2]) else f"{quoted[1]}...{quoted[1]}", message
    )


def printable(text: str) -> str:
    """A text with control characters, line ends and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def moment(record: Told) -> str:
    """The creation time of a record in RFC 3339: UTC, with milliseconds."""
    seconds, milliseconds = divmod(int(record.created * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03d}Z"
