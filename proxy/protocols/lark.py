"""Lark grammars without recursion as regular expressions, which engines hold inside of JSON strings.

Each rule or terminal is replaced by what it stands for. `%import common.X` knows Lark's usual terminals. Recursive
rules, `%ignore`, `%declare`, templates and priorities have no regular expression of this kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokengrove.errors import brief

_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
_TOKENS = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[imslux]*)
    |(?P<range>\.\.)
    |(?P<alias>->[ \t]*[A-Za-z_][A-Za-z_0-9]*)
    |(?P<name>[A-Za-z_][A-Za-z_0-9]*)
    |(?P<count>~[ \t]*[0-9]+(?:[ \t]*\.\.[ \t]*[0-9]+)?)
    |(?P<mark>[()|\[\]?*+])""",
    re.VERBOSE,
)
_HEAD = re.compile(r"[ \t]*[?!]*([A-Za-z_][A-Za-z_0-9]*)[ \t]*:")
_IMPORT = re.compile(r"%import[ \t]+common\.([A-Z_]+)(?:[ \t]*->[ \t]*([A-Z_]+))?[ \t]*\Z")
_META = re.compile(r"[\\.+*?()|\[\]{}^$\-\n\r\t]")
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_LONGEST = 100_000


def regex_of(grammar: str) -> str:
    """Return a regular expression for the whole texts of a Lark grammar, whose first rule is `start`.

    Raises ValueError with the reason if there is none.
    """
    return _Rules.read(grammar).regex("start")


@dataclass(slots=True)
class _Rules:
    """The rules of a grammar: the text of each, and the regular expressions of those that are known.

    `open`: the rules whose regular expressions are being built.
    """

    texts: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, grammar: str) -> _Rules:
        rules, name = cls(), None
        for line in grammar.splitlines():
            if line.lstrip().startswith("//") or not line.strip():
                continue
            if line.lstrip().startswith("%"):
                rules._import(line.strip())
            elif head := _HEAD.match(line):
                name = head[1]
                if name in rules.texts:
                    raise ValueError(f"the rule {brief(name)} is defined twice")
                rules.texts[name] = line[head.end() :]
            elif name is None:
                raise ValueError(f"{brief(line.strip())} is no rule")
            else:
                rules.texts[name] += f"\n{line}"
        return rules

    def _import(self, line: str) -> None:
        found = _IMPORT.match(line)
        if found is None or found[1] not in _COMMON:
            raise ValueError(f"{brief(line)} is not supported")
        self.known[found[2] or found[1]] = _COMMON[found[1]]

    def regex(self, name: str) -> str:
        if name not in self.known:
            if name in self.open:
                raise ValueError(f"the rule {brief(name)} is recursive")
            if name not in self.texts:
                raise ValueError(f"the rule {brief(name)} is not defined")
            self.open.append(name)
            reader = _Reader(self, list(_tokens(self.texts[name])))
            self.known[name] = reader.alternatives()
            if reader.at < len(reader.tokens):
                raise ValueError(f"the rule {brief(name)} has an unexpected {brief(reader.tokens[reader.at][1])}")
            self.open.pop()
            if len(self.known[name]) > _LONGEST:
                raise ValueError("it is too long as a regular expression")
        return self.known[name]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = _TOKENS.match(text, at)
        if found is None:
            raise ValueError(f"{brief(text[at : at + 20].strip())} is not supported")
        at = found.end()
        assert found.lastgroup is not None
        if found.lastgroup not in ("space", "alias"):
            yield found.lastgroup, found[0]


@dataclass(slots=True)
class _Reader:
    """Reads the tokens of one rule. Each method returns a regular expression that can stand alone."""

    rules: _Rules
    tokens: list[tuple[str, str]]
    at: int = 0

    def alternatives(self) -> str:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _sequence(self) -> str:
        parts = []
        while self.at < len(self.tokens) and self.tokens[self.at][1] not in ("|", ")", "]"):
            parts.append(self._repeated())
        return "".join(parts)

    def _repeated(self) -> str:
        one = self._one()
        kind, text = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        if kind == "count":
            least, _, most = text[1:].replace(" ", "").partition("..")
            self.at += 1
            return f"(?:{one}){{{least}}}" if not most else f"(?:{one}){{{least},{most}}}"
        if text in ("?", "*", "+"):
            self.at += 1
            return f"(?:{one}){text}"
        return one

    def _one(self) -> str:
        kind, text = self.tokens[self.at]
        self.at += 1
        if text in ("(", "["):
            inner = self.alternatives()
            if not self._take(")" if text == "(" else "]"):
                raise ValueError(f"a {brief(text)} is not closed")
            return f"(?:{inner})" if text == "(" else f"(?:{inner})?"
        if kind == "name":
            return f"(?:{self.rules.regex(text)})"
        if kind == "regex":
            pattern, _, flags = text[1:].rpartition("/")
            pattern = pattern.replace(r"\/", "/")
            return f"(?{flags}:{pattern})" if flags else f"(?:{pattern})"
        if kind == "text":
            return self._text(text)
        raise ValueError(f"an unexpected {brief(text)}")

    def _text(self, text: str) -> str:
        literal = _unquoted(text)
        if self._take(".."):
            end = _unquoted(self.tokens[self.at][1]) if self.at < len(self.tokens) else ""
            self.at += 1
            if len(literal) != 1 or len(end) != 1:
                raise ValueError("a range needs one character on each side")
            return f"[{_escaped(literal)}-{_escaped(end)}]"
        return f"(?i:{_escaped(literal)})" if text.endswith("i") else _escaped(literal)

    def _take(self, mark: str) -> bool:
        taken = self.at < len(self.tokens) and self.tokens[self.at][1] == mark
        self.at += taken
        return taken


def _escaped(literal: str) -> str:
    """Return a regular expression for a text, without escapes that only Python knows."""
    return _META.sub(lambda found: _CONTROLS.get(found[0], "\\" + found[0]), literal)


def _unquoted(text: str) -> str:
    try:
        literal = json.loads(text.removesuffix("i"))
    except ValueError:
        raise ValueError(f"{brief(text)} has an unknown escape") from None
    return str(literal)
