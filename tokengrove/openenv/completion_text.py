"""The text of a completion in the contract: a `str` with the message that the server parsed from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CompletionText(str):
    """The output as the model wrote it, without its end token.

    `message`: the assistant message that the server parsed. `finish_reason`: the reason of the chat completion. Copies
    of the text are plain `str`s and lose both; recipients must also accept a plain `str`.
    """

    interaction_id: str
    finish_reason: str
    message: dict[str, Any]

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> CompletionText:
        """The first choice of a chat completion that was requested with `return_completion_text`."""
        choice = reply["choices"][0]
        text = cls(choice["completion_text"])
        text.interaction_id, text.finish_reason = reply["id"], choice["finish_reason"]
        told = {name: value for name, value in choice["message"].items() if value is not None}
        text.message = {"role": "assistant", "content": "", **told}
        return text


def message_of(text: str) -> dict[str, Any]:
    """The assistant message of a completion: the parsed message, or for a plain `str` the whole text as content."""
    return dict(text.message) if isinstance(text, CompletionText) else {"role": "assistant", "content": str(text)}
