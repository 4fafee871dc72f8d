"""The server's tokenizer and chat template behind the methods that agent loops call of a tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from proxy.client.libraries import library
from proxy.client.tensors import pad_left, pad_right
from proxy.errors import InvalidRequest, UnsupportedParameter

_USER = {"role": "user", "content": "x"}


class Tokenizes(Protocol):
    """What has the server's tokenizer: a blocking client or session."""

    def tokenize(self, messages: Any, **options: Any) -> list[int]: ...

    def detokenize(self, token_ids: Sequence[int]) -> str: ...


class ServerTokenizer:
    """A tokenizer over HTTP, for code that calls one. It blocks: call it in a thread, as verl's loops do.

    `server`: a blocking client, or a session of one, whose agent key is used. What it renders is what the server would
    render for a turn. `pad_token_id` pads in `pad`; the server does not tell the model's.
    """

    def __init__(self, server: Tokenizes, pad_token_id: int = 0) -> None:
        self.server = server
        self.pad_token_id = pad_token_id
        self.padding_side = "right"

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """The ids of a conversation, or with `tokenize` false its text. Other arguments are for the chat template.

        `[{}]` has what the template writes before a conversation without a system message. Messages that begin with a
        tool result have that, and then what the template appends to an answer of the model for them; so the rest behind
        `[{}]` is exactly what follows a sampled answer. Raises InvalidRequest for what the template cannot express.
        """
        messages = [dict(message) for message in conversation]
        given: dict[str, Any] = {**({"tools": list(tools)} if tools else {})}
        given |= {"chat_template_kwargs": options} if options else {}
        if not any(messages):
            ids = self._prefix + (self._generation_prompt if add_generation_prompt else [])
        elif messages[0].get("role") == "tool":
            ids = self._prefix + self._appended(messages, add_generation_prompt, **given)
        else:
            ids = self.server.tokenize(messages, **given)
            ids = ids if add_generation_prompt else ids[: len(ids) - len(self._generation_prompt)]
        found = ids if tokenize else self.decode(ids)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict and tokenize else found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return self.server.tokenize(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of ids, special tokens included. Raises UnsupportedParameter for `skip_special_tokens`."""
        if skip_special_tokens:
            message = "the server does not tell special tokens; give a tokenizer of transformers, or parse the answer"
            raise UnsupportedParameter(message, param="skip_special_tokens")
        return self.server.detokenize([int(each) for each in np.atleast_1d(token_ids)])

    def pad(
        self,
        encoded_inputs: Any,
        padding: bool | str = True,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool = True,
    ) -> dict[str, Any]:
        """Pad `input_ids`, of one dict or of several, at `padding_side`: to the longest, or to `max_length`.

        `padding`: True or `longest`, or `max_length`. `return_tensors`: `pt`, `np`, or None for lists. Raises
        InvalidRequest if one is longer than `max_length`.
        """
        many = not isinstance(encoded_inputs, Mapping)
        rows = [list(each["input_ids"]) for each in (encoded_inputs if many else [encoded_inputs])]
        length = max_length if padding == "max_length" else None
        if length is not None and (longest := max(map(len, rows), default=0)) > length:
            raise InvalidRequest(f"there are {longest} token ids, and 'max_length' is {length}", param="max_length")
        pad = pad_left if self.padding_side == "left" else pad_right
        found = {"input_ids": pad([np.array(row) for row in rows], np.int64, self.pad_token_id, length)}
        if return_attention_mask:
            found["attention_mask"] = pad([np.ones(len(row)) for row in rows], np.int64, 0, length)
        arrays = {name: each if many else each[0] for name, each in found.items()}
        if return_tensors == "pt":
            return {name: library("torch").tensor(each) for name, each in arrays.items()}
        return arrays if return_tensors == "np" else {name: each.tolist() for name, each in arrays.items()}

    @cached_property
    def _end(self) -> list[int]:
        """The ids that close an answer."""
        before = self.server.tokenize([_USER])
        known = {"messages": 2, "token_ids": before, "output_tokens": 0}
        unclosed = self._continued([], [_USER], False, known)
        for length in range(1, len(unclosed)):
            end = unclosed[:length]
            known = {"messages": 2, "token_ids": before + end, "output_tokens": length}
            if self._continued([], [_USER], False, known) == unclosed[length:]:
                return end
        raise InvalidRequest("the chat template has no end of an answer; give a tokenizer of transformers")

    @cached_property
    def _generation_prompt(self) -> list[int]:
        """What begins an answer."""
        without = self._appended([_USER], False)
        return self._appended([_USER], True)[len(without) :]

    @cached_property
    def _prefix(self) -> list[int]:
        """What the template writes before the first message, without what it also writes between two messages."""
        whole = self.server.tokenize([_USER])
        whole = whole[: len(whole) - len(self._generation_prompt)]
        appended = self._appended([_USER], False)
        same = 0
        while same < min(len(whole), len(appended)) and whole[-same - 1] == appended[-same - 1]:
            same += 1
        return whole[: len(whole) - same]

    def _appended(self, messages: list[dict[str, Any]], generation_prompt: bool, **given: Any) -> list[int]:
        """What the template appends for `messages` to an answer of the model that has ended."""
        before = [*self.server.tokenize([_USER]), *self._end]
        known = {"messages": 2, "token_ids": before, "output_tokens": len(self._end)}
        named = [_named(each, at) for at, each in enumerate(messages)]
        calls = [
            {"id": message["tool_call_id"], "type": "function", "function": {"name": "tool", "arguments": "{}"}}
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
        found = self.server.tokenize([_USER, answer, *messages], continue_from=known, **options, **given)
        return found[len(known["token_ids"]) :]


def _named(message: dict[str, Any], at: int) -> dict[str, Any]:
    """A tool result with the id of a call, which verl's do not have."""
    return {"tool_call_id": f"call_{at}", **message} if message.get("role") == "tool" else message
