"""What a `format_messages` written for ROLL renders with. The managers here need none of it: see `conversation`."""

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
    """The ids of messages by themselves; `tokenizer` is one of transformers or the server's.

    Messages that do not begin with a system message are rendered behind an empty one, whose ids are left out: some
    templates put a default one there. With `skip_mock_system_prompt` they are rendered as they are. Raises
    InvalidRequest for a template that writes the empty one otherwise when messages follow.
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
            "the chat template writes an empty system message otherwise when messages follow; set "
            "skip_mock_system_prompt: true, or leave format_messages to the manager",
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
