"""Visible text for the client: optionally without surrounding white space, and ended by the first stop string.

Text that was sent is never taken back: trailing white space waits until other text follows, and text that may begin a
stop string waits until it turns out not to.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.rendering.parsing.lexer import longest_start


class VisibleText:
    """Incremental filter of visible text. Leading white space is dropped before stop strings are searched for.

    `begun`: existing text, which is neither returned nor searched. `strip` False: white space stays. `keeps_stop`: the
    text includes the stop string that ends it.
    """

    def __init__(self, stop: Sequence[str] = (), begun: str = "", *, strip: bool = True) -> None:
        self._strip = strip
        self._stop = tuple(filter(None, stop))
        self._parts: list[str] = [begun]
        self._candidate = ""
        self._space = ""
        self._started = bool(begun) or not strip
        self.stop_string: str | None = None
        self.keeps_stop = False

    @property
    def text(self) -> str:
        """`begun`, and all text returned so far."""
        return "".join(self._parts)

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Add `text` and return what can be sent. `may_stop` False: a stop string that it completes is text."""
        if self.stop_string is not None:
            return ""
        if not self._started:
            text = text.lstrip()
            self._started = bool(text)
        if self._stop:
            text = self._before_stop(self._candidate + text, may_stop)
        if not text:
            return ""
        text = self._space + text
        shown = text.rstrip() if self._strip else text
        self._space = text[len(shown) :]
        if shown:
            self._parts.append(shown)
        return shown

    def flush(self) -> str:
        """End the text and return the rest. A possible beginning of a stop string is then text."""
        text, self._candidate, self._stop = self._candidate, "", ()
        return self.push(text) if text else ""

    def _before_stop(self, text: str, may_stop: bool) -> str:
        # The stop string that ends first counts; if two end together, the longer one.
        matches = ((text.find(word) + len(word), -len(word), word) for word in self._stop if word in text)
        found = min(matches, default=None) if may_stop else None
        if found is not None:
            self.stop_string, self._candidate = found[2], ""
            return text[: found[0] + (0 if self.keeps_stop else found[1])]
        keep = longest_start(text, self._stop)
        self._candidate = text[len(text) - keep :]
        return text[: len(text) - keep]
