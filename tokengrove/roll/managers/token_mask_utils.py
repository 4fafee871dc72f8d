"""Rendering functions for a `format_messages` written for ROLL. The managers here use `conversation` instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.server_tokenizer import ServerTokenizer

_MOCK = {"role": "system", "content": ""}


def custom_apply_chat_template(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    add_generation_prompt: bool = True,
    enable_thinking: bool = False,
    skip_mock_system_prompt: bool = False,
) -> list[int]:
    """The ids of messages alone; `tokenizer` is a tokenizer of transformers or the server's.

    Messages that do not begin with a system message are rendered after an empty one, whose ids are removed, since some
    templates insert a default one. With `skip_mock_system_prompt` they are rendered unchanged. Raises InvalidRequest
    for a template that renders the empty message differently when messages follow.
    """

    def ids(conversation: Sequence[Mapping[str, Any]], generation_prompt: bool) -> list[int]:
        options = {"add_generation_prompt": generation_prompt, "enable_thinking": enable_thinking}
        return list(tokenizer.apply_chat_template(list(conversation), tokenize=True, return_dict=False, **options))

    if not messages:
        return []
    if messages[0]["role"] == "system" or skip_mock_system_prompt:
        return ids(messages, add_generation_prompt)
    mock, whole = ids([_MOCK], False), ids([_MOCK, *messages], add_generation_prompt)
    if whole[: len(mock)] != mock:
        raise InvalidRequest(
            "the chat template renders an empty system message differently when messages follow; set "
            "skip_mock_system_prompt: true, or do not override format_messages",
            param="skip_mock_system_prompt",
        )
    return whole[len(mock) :]


def compute_conversation_end_token_id(tokenizer: Any) -> list[int]:
    """The last special token of a user's turn, as a list; empty if the chat template ends turns without one."""
    user = [{"role": "user", "content": ""}]
    ids = list(tokenizer.apply_chat_template(user, tokenize=True, return_dict=False))
    special = (
        tokenizer.server.end_token_ids() if isinstance(tokenizer, ServerTokenizer) else list(tokenizer.all_special_ids)
    )
    return next(([token] for token in reversed(ids) if token in special), [])
