"""Text on its way to the client: without white space around it, ended by the first stop string.

What was given out once is never taken back: white space waits until something follows it, and a piece that may be
the start of a stop string waits until it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.rendering.parsing.lexer import longest_start


class VisibleText:
    """White space before the first character is not visible: stop strings do not see it either."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(word for word in stop if word)
        self._parts: list[str] = []
        self._candidate = ""
        self._space = ""
        self._started = False
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """All that was given out, joined."""
        return "".join(self._parts)

    def push(self, text: str) -> str:
        """What can be given out now."""
        if self.stop_string is not None:
            return ""
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        if self._stop:
            text = self._before_stop(self._candidate + text)
        return self._without_end_space(text)

    def flush(self) -> str:
        """The end: what might have been the start of a stop string is text after all."""
        text, self._candidate = self._candidate, ""
        return self._without_end_space(text)

    def _before_stop(self, text: str) -> str:
        # The stop string that is complete first; where two end together, the one that begins first.
        matches = ((text.find(word) + len(word), -len(word), word) for word in self._stop if word in text)
        found = min(matches, default=None)
        if found is not None:
            self.stop_string, self._candidate = found[2], ""
            return text[: found[0] + found[1]]
        keep = longest_start(text, self._stop)
        self._candidate = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _without_end_space(self, text: str) -> str:
        if not text:
            return ""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._parts.append(shown)
        return shown
