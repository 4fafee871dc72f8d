"""One harness whose calls of the model are held until somebody answers them, in a session of a mailbox server.

A call is answered once. When the harness has ended, or is dead, its session ends too, and nobody waits for it any more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx

from tokengrove.client.options import Delivery
from tokengrove.errors import NotFound, SessionClosed
from tokengrove.openenv.completion_text import CompletionText
from tokengrove.rollout.episode import BlockingEpisode

_POLL_S = 30.0
_OF_MESSAGES = ("chat", "responses", "messages")
_NO_MESSAGES = "this harness is answered by message; it sent a prompt of text or token ids"
_log = logging.getLogger(__name__)


class Interception:
    """What a harness gets (`base_url`, `root_url`, `api_key`), and how its calls are fetched and answered.

    `base_url` ends in /v1 (OpenAI's SDKs), `root_url` does not (Anthropic's). `rollout_id`: as it was opened.
    """

    def __init__(self, episode: BlockingEpisode, rollout_id: str) -> None:
        self._client, self._episode = episode.client, episode
        self.rollout_id, self.session_id = rollout_id, episode.session_id
        self.base_url, self.root_url, self.api_key = episode.base_url, episode.root_url, episode.api_key

    def next_request(self) -> dict[str, Any] | None:
        """Wait for the harness's next call; return None once it has ended (`end`).

        The call has `messages`, `tools` and `request_id`; `sampling`, what the harness asked for beside them as fields
        of a chat completion; `api` and `turn`. A call that is fetched and not answered is returned again.
        """
        while True:
            letter = self._client.next_request(self.session_id, wait_s=_POLL_S)
            if letter["status"] == "ended":
                return None
            if letter["status"] == "request":
                if letter["api"] in _OF_MESSAGES:
                    return _intercept(letter)
                self._answer({"interaction_id": letter["request_id"], "error": _NO_MESSAGES})

    def deliver(self, intercept: Mapping[str, Any], completion_text: str) -> None:
        """Answer a call with what the model has written. Calls and reasoning in the markup of the model's family reach
        the harness as such. A harness that has left meanwhile gets nothing.

        Raises InvalidRequest for a call that was answered already.
        """
        cut = isinstance(completion_text, CompletionText) and completion_text.finish_reason == "length"
        finish: Delivery = {"finish_reason": "length"} if cut else {}
        self._answer({"interaction_id": intercept["request_id"], "text": str(completion_text), **finish})

    def refuse(self, intercept: Mapping[str, Any], reason: str) -> None:
        """Answer a call with an error: the harness gets 502 with this reason."""
        self._answer({"interaction_id": intercept["request_id"], "error": reason})

    def http_client(self) -> httpx.Client:
        """An HTTP client for the harness, which also reaches a server of this process. The caller closes it."""
        return self._client.http_client()

    def end(self, error: BaseException | None = None) -> None:
        """Say that the harness has ended, with `error` if it died; `next_request` returns None from now on. Again:
        nothing.
        """
        with suppress(SessionClosed):
            if error is None:
                self._episode.end(outcome="Finished")
            else:
                self._episode.fail(error)

    def _answer(self, answer: Delivery) -> None:
        try:
            self._client.deliver(**answer)
        except NotFound:
            _log.info("%s: the harness has left before its call was answered", self.rollout_id)


def _intercept(letter: Mapping[str, Any]) -> dict[str, Any]:
    """A request of the mailbox in the shape of the contract. What the harness began to answer (prefill) becomes the
    last message, which the answer continues.
    """
    messages, sampling = list(letter["messages"]), dict(letter["asked"])
    choice = letter["tool_choice"]
    if letter["tools"] and choice["mode"] != "auto":
        named = {"type": "function", "function": {"name": choice["name"]}}
        sampling["tool_choice"] = named if choice["name"] is not None else choice["mode"]
    if letter["prefill"] is not None:
        messages.append({"role": "assistant", "content": letter["prefill"]})
        sampling |= {"continue_final_message": True, "add_generation_prompt": False}
    return {
        "messages": messages,
        "tools": letter["tools"],
        "request_id": letter["request_id"],
        "sampling": sampling,
        **{name: letter[name] for name in ("api", "turn", "model")},
    }
