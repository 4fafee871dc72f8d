"""The interception of one harness: its calls of the model wait for answers in a session of a mailbox server.

A call is answered once. When the harness has ended or failed, its session ends, and no request waits any longer.
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
_NO_MESSAGES = "this harness is answered with messages; it sent a prompt of text or token ids"
_log = logging.getLogger(__name__)


class Interception:
    """The address of a harness (`base_url`, `root_url`, `api_key`), and methods to fetch and answer its calls.

    `base_url` ends in /v1 (OpenAI's SDKs), `root_url` does not (Anthropic's). `rollout_id`: the argument of `open`.
    """

    def __init__(self, episode: BlockingEpisode, rollout_id: str) -> None:
        self._client, self._episode = episode.client, episode
        self.rollout_id, self.session_id = rollout_id, episode.session_id
        self.base_url, self.root_url, self.api_key = episode.base_url, episode.root_url, episode.api_key

    def next_request(self) -> dict[str, Any] | None:
        """Wait for the harness's next call; return None after its end (`end`).

        The call has `messages`, `tools` and `request_id`, `sampling` (the harness's other fields, as in a chat
        completion), `api`, `turn` and `model`. A call that was fetched and not answered is returned again.
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
        """Answer a call with the model's text. Tool calls and reasoning in the markup of the model's family are parsed
        for the harness. An answer to a harness that has disconnected is dropped.

        Raises InvalidRequest for a call that was answered already.
        """
        cut = isinstance(completion_text, CompletionText) and completion_text.finish_reason == "length"
        finish: Delivery = {"finish_reason": "length"} if cut else {}
        self._answer({"interaction_id": intercept["request_id"], "text": str(completion_text), **finish})

    def refuse(self, intercept: Mapping[str, Any], reason: str) -> None:
        """Answer a call with an error: the harness receives status 502 with this reason."""
        self._answer({"interaction_id": intercept["request_id"], "error": reason})

    def http_client(self) -> httpx.Client:
        """An HTTP client for the harness, which also reaches a server of this process. The caller closes it."""
        return self._client.http_client()

    def end(self, error: BaseException | None = None) -> None:
        """Record that the harness has ended, with `error` if it failed; from now on `next_request` returns None.
        Repeated calls do nothing.
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
            _log.info("%s: the harness disconnected before its call was answered", self.rollout_id)


def _intercept(letter: Mapping[str, Any]) -> dict[str, Any]:
    """A request of the mailbox in the contract's format. The beginning of an answer that the harness sent (prefill)
    becomes the last message, which the answer continues.
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
