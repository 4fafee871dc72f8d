"""The text of a completion as the contract hands it over: a `str` that also knows what it was read as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CompletionText(str):
    """The output as the model wrote it, without its end token.

    `message`: the assistant message that the server read it as. `finish_reason`: that of a chat completion. Both are
    lost once the text is copied; whoever gets a plain `str` does without them.
    """

    interaction_id: str
    finish_reason: str
    message: dict[str, Any]

    @classmethod
    def of(cls, reply: Mapping[str, Any]) -> CompletionText:
        """The first choice of a chat completion that was asked for with `return_completion_text`."""
        choice = reply["choices"][0]
        text = cls(choice["completion_text"])
        text.interaction_id, text.finish_reason = reply["id"], choice["finish_reason"]
        told = {name: value for name, value in choice["message"].items() if value is not None}
        text.message = {"role": "assistant", "content": "", **told}
        return text


def message_of(text: str) -> dict[str, Any]:
    """The assistant message of a completion: as it was read, or else with the whole text as its content."""
    return dict(text.message) if isinstance(text, CompletionText) else {"role": "assistant", "content": str(text)}
