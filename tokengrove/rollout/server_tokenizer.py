"""The server's tokenizer and chat template, with the methods of transformers' tokenizers that agent loops call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tokengrove.client.libraries import library
from tokengrove.client.tensors import pad_left, pad_right
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.server_template import ServerTemplate, Tokenizes


class ServerTokenizer:
    """A tokenizer over HTTP. All calls block: use it in a thread, as verl's loops do.

    `server`: a blocking client, or one of its sessions, whose agent key is then used. Conversations are rendered as the
    server renders them for a turn. `pad_token_id`: the id with which `pad` pads; the server does not report the
    model's. `template`: a template to share between tokenizers.
    """

    def __init__(self, server: Tokenizes, pad_token_id: int = 0, *, template: ServerTemplate | None = None) -> None:
        self.server = server
        self._template = ServerTemplate(server) if template is None else template
        self.pad_token_id = pad_token_id
        self.padding_side = "right"

    def prepare(self) -> None:
        """Fetch the values that `apply_chat_template([{}])` needs, so that this call does not block."""
        _ = self._template.prefix, self._template.generation_prompt

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        """The ids of a conversation, or its text if `tokenize` is false. Other arguments are passed to the template.

        `[{}]` gives the ids that the template writes before a conversation without a system message. Messages that
        begin with a tool result give these ids, followed by the ids that the template appends to an answer of the
        model. So the ids after those of `[{}]` are exactly the ids that follow a sampled answer. Raises InvalidRequest
        for messages that the template cannot express.
        """
        messages = [dict(message) for message in conversation]
        given: dict[str, Any] = {**({"tools": list(tools)} if tools else {})}
        given |= {"chat_template_kwargs": options} if options else {}
        if not any(messages):
            ids = self._template.prefix + (self._template.generation_prompt if add_generation_prompt else [])
        elif messages[0].get("role") == "tool":
            ids = self._template.prefix + self._template.appended(messages, add_generation_prompt, **given)
        else:
            given |= {} if add_generation_prompt else {"add_generation_prompt": False}
            ids = self.server.tokenize(messages, **given)
        found = ids if tokenize else self.decode(ids)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict and tokenize else found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text."""
        return self.server.tokenize(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """The text of ids, without special tokens if `skip_special_tokens`."""
        ids = [int(each) for each in np.atleast_1d(token_ids)]
        return self.server.detokenize(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        """The texts of several sequences of ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    @cached_property
    def eos_token_id(self) -> int | None:
        """The first id that ends the model's answers; None if there is none."""
        return next(iter(self.server.end_token_ids()), None)

    def pad(
        self,
        encoded_inputs: Any,
        padding: bool | str = True,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool = True,
    ) -> dict[str, Any]:
        """Pad the `input_ids` of one dict or of several on `padding_side`, to the longest row or to `max_length`.

        `padding`: `max_length` pads to `max_length`; other values pad to the longest row. `return_tensors`: `pt`, `np`,
        or None for lists. Raises InvalidRequest for a row longer than `max_length`.
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
