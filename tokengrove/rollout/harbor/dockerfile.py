"""Parses the instructions of a Dockerfile's last stage.

Nothing is run. Instructions that have no meaning without an image are kept, so that they can be reported.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokengrove.rollout.harbor.task_folder import BadTask

_FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s+")
_HEREDOC = re.compile(r"<<(-?) *(['\"]?)([A-Za-z_][A-Za-z0-9_]*)\2")
_VARIABLE = re.compile(r"\\(\$)|\$(?:\{(\w+)(?::([-+])([^}]*))?\}|(\w+))")
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*$")
_PAIR = re.compile(r"""(\w[\w.-]*)=((?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|[^\s\\"'])*)""")
_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)"' + r"|'([^']*)'|\\(.)|([^\\\"']+)", re.DOTALL)
KNOWN = frozenset(
    word
    for line in (
        "FROM RUN CMD LABEL MAINTAINER EXPOSE ENV ADD COPY ENTRYPOINT VOLUME USER WORKDIR ARG ONBUILD STOPSIGNAL",
        "HEALTHCHECK SHELL",
    )
    for word in line.split()
)


@dataclass(frozen=True, slots=True)
class Heredoc:
    """A here-document. `expanded`: variables in it are replaced with their values."""

    name: str
    text: str
    expanded: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """`value`: the text after the name and flags. `words`: its JSON list, or None. `where`: the file and line."""

    name: str
    value: str
    flags: Mapping[str, str]
    heredocs: tuple[Heredoc, ...]
    where: str

    @property
    def words(self) -> list[str] | None:
        if not self.value.startswith("["):
            return None
        try:
            words = json.loads(self.value)
        except (ValueError, RecursionError):
            return None
        return words if all(isinstance(word, str) for word in words) else None


def instructions(file: Path) -> list[Instruction]:
    """The instructions of the last stage and of the stages that it is based on, and the ARGs before all stages.

    Raises BadTask for a file that is not a Dockerfile.
    """
    before: list[Instruction] = []
    stages: list[list[Instruction]] = []
    names: dict[str, int] = {}
    for each in _read(file):
        if each.name == "FROM":
            words = each.value.split()
            base = names.get(words[0].lower()) if words else None
            stages.append([each] if base is None else list(stages[base]))
            if len(words) == 3 and words[1].upper() == "AS":
                names[words[2].lower()] = len(stages) - 1
        elif stages:
            stages[-1].append(each)
        elif each.name == "ARG":
            before.append(each)
        else:
            raise BadTask(f"{each.where}: {each.name} before the first FROM")
    if not stages:
        raise BadTask(f"{file} has no FROM")
    return [*before, *stages[-1]]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+other}` with their values."""

    def value(match: re.Match[str]) -> str:
        escaped, braced, kind, other, plain = match.groups()
        if escaped:
            return "$"
        found = variables.get(braced or plain, "")
        if kind == "-":
            return found or expand(other, variables)
        if kind == "+":
            return expand(other, variables) if found else ""
        return found

    return _VARIABLE.sub(value, text)


def pairs(each: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """The names and values of ENV and LABEL: `A=b "C"=d`, or the older form `A b`."""
    if not re.match(r"\w[\w.-]*=", each.value):
        name, _, value = each.value.partition(" ")
        return {name: expand(value.strip(), variables)}
    return {name: unquoted(value, variables) for name, value in _PAIR.findall(each.value)}


def unquoted(text: str, variables: Mapping[str, str]) -> str:
    """Remove quotes and replace variables, except in single quotes."""
    parts = []
    for double, single, escaped, plain in _QUOTED.findall(text):
        parts.append(single or escaped or expand(re.sub(r"\\([\"\\])", r"\1", double) if double else plain, variables))
    return "".join(parts)


def _read(file: Path) -> Iterator[Instruction]:
    lines = deque(enumerate(file.read_text(encoding="utf-8").splitlines(), 1))
    escape = _escape(lines)
    while lines:
        number, line = lines.popleft()
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = [line.strip()]
        while parts[-1].endswith(escape) and lines:
            following = lines.popleft()[1].strip()
            if following and not following.startswith("#"):
                parts[-1] = parts[-1][:-1].rstrip()
                parts.append(following)
        text = " ".join(part for part in parts if part).removesuffix(escape)
        yield _instruction(text, lines, f"{file}, line {number}")


def _escape(lines: Iterable[tuple[int, str]]) -> str:
    for _, line in lines:
        match = _DIRECTIVE.match(line.strip())
        if match is None:
            break
        if match[1].lower() == "escape":
            return match[2]
    return "\\"


def _instruction(text: str, lines: deque[tuple[int, str]], where: str) -> Instruction:
    name, _, value = text.partition(" ")
    name, value, flags = name.upper(), value.strip(), dict[str, str]()
    if name not in KNOWN:
        raise BadTask(f"{where}: {name} is not an instruction of a Dockerfile")
    while match := _FLAG.match(value):
        flags[match[1]] = match[2] or ""
        value = value[match.end() :].strip()
    heredocs: list[Heredoc] = []
    if name in ("RUN", "COPY", "ADD"):
        for dash, quote, word in _HEREDOC.findall(value):
            heredocs.append(Heredoc(word, _heredoc(lines, word, bool(dash), where), not quote))
    return Instruction(name, value, flags, tuple(heredocs), where)


def _heredoc(lines: deque[tuple[int, str]], end: str, tabs: bool, where: str) -> str:
    text: list[str] = []
    while lines:
        line = lines.popleft()[1]
        line = line.lstrip("\t") if tabs else line
        if line == end:
            return "".join(f"{each}\n" for each in text)
        text.append(line)
    raise BadTask(f"{where}: the here-document {end!r} has no end")
