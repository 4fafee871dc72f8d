"""Incremental JSON scanner: `push` accepts text only as long as all text so far can still become one JSON value.

The place where it stops depends on the text alone, never on how it was divided. Standard JSON: no NaN, no control
characters.
"""

from __future__ import annotations

import re

# Python's own parser fails near 1000 levels; the arguments of real tools have a few.
MAX_DEPTH = 200

# Python's int() refuses more than 4300 digits.
MAX_NUMBER = 4000

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\n\r]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_START = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*|(?:\.[0-9]+)?[eE][+-]?[0-9]*)?)?")
_WORDS = ("true", "false", "null")
_CLOSERS = {"{": "}", "[": "]"}

# States, named after what may come next.
_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _AFTER, _STRING, _ESCAPE, _HEX, _WORD, _END = range(11)


class JsonText:
    """Scans one value. `complete`: the value has ended. `broken`: the text can never become a value.

    A top-level number is complete only once the character after it is seen.
    """

    __slots__ = ("_escape", "_expect", "_in_key", "_open", "_word", "broken")

    def __init__(self) -> None:
        self._open: list[str] = []
        self._expect = _VALUE
        self._in_key = False
        self._word = ""
        self._escape = 0
        self.broken = False

    @property
    def complete(self) -> bool:
        return self._expect == _END

    @property
    def valid_start(self) -> bool:
        """Whether the value continues validly after its first bracket; `{'a'`, for example, does not."""
        if len(self._open) > 1 or self.complete:
            return True
        return bool(self._open) and self._expect not in (_FIRST_KEY, _FIRST_VALUE)

    def push(self, text: str, at: int = 0) -> int:
        """Read `text[at:]` and return the index after the part taken. It is less than the length of `text` if the value
        ended or broke."""
        size = len(text)
        while at < size and self._expect != _END and not self.broken:
            if self._expect == _STRING:
                at = self._in_string(text, at)
            elif self._expect in (_ESCAPE, _HEX):
                at = self._in_escape(text[at], at)
            elif self._expect == _WORD:
                at = self._in_word(text[at], at)
            elif space := _SPACE.match(text, at):
                at = space.end()
            else:
                at = self._structure(text[at], at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            return plain.end()
        if text[at] == '"':
            if self._in_key:
                self._expect, self._in_key = _COLON, False
            else:
                self._value_done()
        elif text[at] == "\\":
            self._expect = _ESCAPE
        else:
            return self._break(at)
        return at + 1

    def _in_escape(self, char: str, at: int) -> int:
        if self._expect == _HEX:
            if char not in "0123456789abcdefABCDEF":
                return self._break(at)
            self._escape -= 1
            if not self._escape:
                self._expect = _STRING
        elif char == "u":
            self._expect, self._escape = _HEX, 4
        elif char in '"\\/bfnrt':
            self._expect = _STRING
        else:
            return self._break(at)
        return at + 1

    def _in_word(self, char: str, at: int) -> int:
        word = self._word + char
        if any(known.startswith(word) for known in _WORDS):
            self._word = word
            if word in _WORDS:
                self._value_done()
            return at + 1
        if _NUMBER_START.fullmatch(word) and len(word) <= MAX_NUMBER:
            self._word = word
            return at + 1
        if _NUMBER.fullmatch(self._word) and char in " \t\n\r,]}":
            self._value_done()
            return at
        return self._break(at)

    def _structure(self, char: str, at: int) -> int:
        expect = self._expect
        if expect in (_FIRST_KEY, _FIRST_VALUE, _AFTER) and char == _CLOSERS[self._open[-1]]:
            self._open.pop()
            self._value_done()
        elif expect == _COLON and char == ":":
            self._expect = _VALUE
        elif expect == _AFTER and char == ",":
            self._expect = _KEY if self._open[-1] == "{" else _VALUE
        elif expect in (_KEY, _FIRST_KEY) and char == '"':
            self._expect, self._in_key = _STRING, True
        elif expect in (_VALUE, _FIRST_VALUE):
            return self._begin(char, at)
        else:
            return self._break(at)
        return at + 1

    def _begin(self, char: str, at: int) -> int:
        if char in _CLOSERS and len(self._open) < MAX_DEPTH:
            self._open.append(char)
            self._expect = _FIRST_KEY if char == "{" else _FIRST_VALUE
        elif char == '"':
            self._expect = _STRING
        elif char in "-0123456789tfn":
            self._expect, self._word = _WORD, char
        else:
            return self._break(at)
        return at + 1

    def _value_done(self) -> None:
        self._expect = _AFTER if self._open else _END

    def _break(self, at: int) -> int:
        self.broken = True
        return at
