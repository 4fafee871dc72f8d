"""The tokens that the server's chat template writes around messages, found by rendering."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

_USER = {"role": "user", "content": "x"}


class Tokenizes(Protocol):
    """An object with the server's tokenizer: a blocking client or session."""

    def tokenize(self, messages: Any, **options: Any) -> list[int]: ...

    def end_token_ids(self) -> list[int]: ...

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class ServerTemplate:
    """The chat template of `server`. All calls block. Values that no conversation changes are requested once."""

    def __init__(self, server: Tokenizes) -> None:
        self._server = server

    @cached_property
    def end(self) -> list[int]:
        """The ids that end an empty answer: the end of the reasoning if the template needs it, and an end token."""
        models = self._server.end_token_ids()
        known = {"messages": 2, "token_ids": self._server.tokenize([_USER]), "output_tokens": 0}
        unclosed = self._continued([], [_USER], False, known)
        at = next((place for place, token in enumerate(unclosed) if token in models), None)
        return models[:1] if at is None else unclosed[: at + 1]

    @cached_property
    def generation_prompt(self) -> list[int]:
        """The ids that begin an answer."""
        return self._server.tokenize([_USER])[len(self._before_answer) :]

    @cached_property
    def prefix(self) -> list[int]:
        """The ids before the first message, without ids that the template also writes between two messages."""
        whole, appended = self._before_answer, self.appended([_USER], False)
        same = 0
        while same < min(len(whole), len(appended)) and whole[-same - 1] == appended[-same - 1]:
            same += 1
        return whole[: len(whole) - same]

    @cached_property
    def _before_answer(self) -> list[int]:
        return self._server.tokenize([_USER], add_generation_prompt=False)

    def appended(self, messages: list[dict[str, Any]], generation_prompt: bool, **given: Any) -> list[int]:
        """The ids that the template appends for `messages` after a complete answer of the model."""
        before = [*self._server.tokenize([_USER]), *self.end]
        known = {"messages": 2, "token_ids": before, "output_tokens": len(self.end)}
        named = [_named(each, at) for at, each in enumerate(messages)]
        calls = [
            _call(message["tool_call_id"], message.get("name") or "tool")
            for message in named
            if message.get("role") == "tool"
        ]
        return self._continued(calls, named, generation_prompt, known, **given)

    def _continued(
        self,
        calls: list[dict[str, Any]],
        messages: Sequence[dict[str, Any]],
        generation_prompt: bool,
        known: dict[str, Any],
        **given: Any,
    ) -> list[int]:
        answer = {"role": "assistant", "content": "", **({"tool_calls": calls} if calls else {})}
        options = {} if generation_prompt else {"add_generation_prompt": False}
        found = self._server.tokenize([_USER, answer, *messages], continue_from=known, **options, **given)
        return found[len(known["token_ids"]) :]


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def _named(message: dict[str, Any], at: int) -> dict[str, Any]:
    """A message; a tool result without a `tool_call_id`, as in verl, gets one."""
    return {"tool_call_id": f"call_{at}", **message} if message.get("role") == "tool" else message
