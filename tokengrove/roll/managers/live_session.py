"""The session of the running episode, for objects that outlive an episode: tokenizers and proxies of the model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from tokengrove.client import Client, Session
from tokengrove.client.options import GenerateOptions, ParseOptions
from tokengrove.client.values import Generated
from tokengrove.rollout.retries import retried_here

_RETRY_S = 60.0
"""Seconds that a turn is retried while the server restarts; the client retries all other calls."""


class LiveSession:
    """`running()` returns the session of the running episode, or None; then `client` tokenizes.

    `answers` has the outputs sampled in the episode, in order.
    """

    def __init__(self, client: Client, running: Callable[[], Session | None]) -> None:
        self._client, self._running = client, running
        self.answers: list[Generated] = []

    def generate(self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Generated:
        """Like `Session.generate`: a turn of the episode, sampled once even if it is retried.

        Raises RuntimeError while no episode is running.
        """
        if (session := self._running()) is None:
            raise RuntimeError("no episode is running: reset() begins one, and every sampled turn belongs to one")
        options = {"idempotency_key": uuid.uuid4().hex, **options}
        made = retried_here(lambda: session.generate(prompt_ids, **options), _RETRY_S)
        self.answers.append(made)
        return made

    def name_turns(self, history: Iterable[dict[str, Any]]) -> None:
        """Set the missing `interaction_id`s of steps, by the tokens of the answers.

        A `make_decision` written for ROLL records the tokens of its answer, and no turn.
        """
        entries = [entry for entry in history if "response_ids" in entry]
        named = {entry["interaction_id"] for entry in entries if "interaction_id" in entry}
        left = [answer for answer in self.answers if answer.id not in named]
        for entry in entries:
            if "interaction_id" not in entry:
                sampled = list(entry["response_ids"])
                found = next((at for at, answer in enumerate(left) if answer.output_ids == sampled), None)
                if found is not None:
                    entry["interaction_id"] = left.pop(found).id

    def tokenize(self, messages: Any, **options: Any) -> list[int]:
        """Like `Session.tokenize`."""
        return self._server.tokenize(messages, **options)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Like `Session.detokenize`."""
        return self._server.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    def end_token_ids(self) -> list[int]:
        """Like `Session.end_token_ids`."""
        return self._server.end_token_ids()

    def parse(self, token_ids: Sequence[int], **options: Unpack[ParseOptions]) -> dict[str, Any]:
        """Like `Session.parse`."""
        return self._server.parse(token_ids, **options)

    @property
    def _server(self) -> Client | Session:
        return self._running() or self._client
