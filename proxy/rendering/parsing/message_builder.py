"""Builds the assistant message and its deltas together, so that the joined deltas always give the message."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.rendering.parsing.lexer import longest_start
from proxy.rendering.tool_calls.tool_format import Malformed
from proxy.types import Message, Role, ToolCall

NOTHING = Message(Role.ASSISTANT)


class MessageBuilder:
    """Builds one message, after `begun`, for which there are no deltas. `deltas`: the new deltas; the parser replaces
    the list at each step. `called`: a call has begun. `strip`: drop white space around the visible text. It has no
    reference to its sinks, which refer to it, so all are freed without the garbage collector."""

    def __init__(
        self, stop: Sequence[str], call_id: Callable[[], str], begun: Message = NOTHING, *, strip: bool = True
    ) -> None:
        self._content = VisibleText(stop, begun.content, strip=strip)
        self._reasoning = VisibleText(begun=begun.reasoning) if begun.reasoning else None
        self._call_id = call_id
        self._calls: list[ToolCall] = []
        self._label = ""
        self._maybe_label = ""
        self.deltas: list[Delta] = []
        self.called = False

    def message(self, unfinished: tuple[ToolCall, ...] = ()) -> Message:
        """The message so far, with an unfinished call."""
        reasoning = None if self._reasoning is None else "".join(self._reasoning.parts) or None
        return Message(Role.ASSISTANT, "".join(self._content.parts), (*self._calls, *unfinished), reasoning=reasoning)

    def keep_stop_string(self) -> None:
        """Let the visible text include its stop string."""
        self._content.keeps_stop = True

    def text(self, text: str, *, may_stop: bool) -> str | None:
        """Append to the visible text. Return the stop string that ended it, if one did and `may_stop` is set."""
        shown = self._content.push(text, may_stop=may_stop)
        if shown:
            self.deltas.append(TextDelta(shown))
        return self._content.stop_string

    def flush(self) -> None:
        """Release the text that was held back: the output has ended."""
        if self._label or self._maybe_label:
            self.end_label()
        shown = self._content.flush()
        if shown:
            self.deltas.append(TextDelta(shown))

    def begin_label(self, label: str) -> None:
        """Expect `label`: it is dropped if the following reasoning begins with it."""
        self._label = label

    def end_label(self) -> None:
        """Stop expecting a label: text held back as its possible start is reasoning."""
        self._label, text, self._maybe_label = "", self._maybe_label, ""
        if text:
            self.reasoning(text)

    def reasoning(self, text: str) -> None:
        """Append to the reasoning."""
        if self._label:
            self._compare_label(text)
            return
        if self._reasoning is None:
            self._reasoning = VisibleText()
        shown = self._reasoning.push(text)
        if shown:
            self.deltas.append(ReasoningDelta(shown))

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def begin_call(self, name: str) -> ToolCall:
        self.called = True
        call = ToolCall(self._call_id(), name, "")
        self.add(ToolCallStart(len(self._calls), call.id, name))
        return call

    def add_arguments(self, fragment: str) -> None:
        self.add(ToolCallArguments(len(self._calls), fragment))

    def end_call(self, call: ToolCall) -> None:
        self.add(ToolCallEnd(len(self._calls)))
        self._calls.append(call)

    def _compare_label(self, text: str) -> None:
        self._maybe_label += text
        if self._maybe_label.startswith(self._label):
            self._maybe_label = self._maybe_label[len(self._label) :]
        elif self._label.startswith(self._maybe_label):
            return
        self.end_label()


class RegionSink:
    """The CallSink of one region of calls. `names`: only these functions can be called; None: any.

    `rest`: set when a call ends, to the unread rest of the current piece.
    """

    def __init__(self, built: MessageBuilder, names: frozenset[str] | None) -> None:
        self._built = built
        self._names = names
        self._call: ToolCall | None = None
        self._parts: list[str] = []
        self.rest: str | None = None

    @property
    def open(self) -> bool:
        return self._call is not None

    def start(self, name: str) -> None:
        if (self._names is not None and name not in self._names) or not _is_text(name):
            raise Malformed
        self._call = self._built.begin_call(name)
        self._parts = []

    def arguments(self, fragment: str) -> None:
        if fragment:
            self._parts.append(fragment)
            self._built.add_arguments(fragment)

    def end(self, rest: str) -> None:
        self.cut()
        self.rest = rest

    def cut(self) -> None:
        """End the open call here, even if its arguments are incomplete."""
        for call in self.unfinished():
            self._call = None
            self._built.end_call(call)

    def unfinished(self) -> tuple[ToolCall, ...]:
        call = self._call
        return () if call is None else (ToolCall(call.id, call.name, "".join(self._parts)),)


def _is_text(name: str) -> bool:
    """Return whether `name` has a UTF-8 encoding: JSON can escape lone surrogates, but they cannot be sent."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class VisibleText:
    """Incremental filter of visible text. Leading white space is dropped before stop strings are searched for.

    `begun`: existing text, which is neither returned nor searched. `strip` False: white space stays. `keeps_stop`: the
    text includes the stop string that ends it. `parts`: `begun`, and all text returned so far.
    """

    def __init__(self, stop: Sequence[str] = (), begun: str = "", *, strip: bool = True) -> None:
        self._strip = strip
        self._stop = tuple(filter(None, stop))
        self.parts: list[str] = [begun]
        self._candidate = ""
        self._space = ""
        self._started = bool(begun) or not strip
        self.stop_string: str | None = None
        self.keeps_stop = False

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
            self.parts.append(shown)
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
