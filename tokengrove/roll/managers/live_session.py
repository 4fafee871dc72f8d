"""The session of whichever episode runs, for what outlives an episode: tokenizers and proxies of the model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from tokengrove.client import Client, Session
from tokengrove.client.options import GenerateOptions, ParseOptions
from tokengrove.client.values import Generated
from tokengrove.rollout.retries import retried_here

_RETRY_S = 60.0
"""How long a turn is tried again while the server restarts: the client repeats everything else."""


class LiveSession:
    """`running()` is the session of the running episode, or None; `client` tokenizes while there is none.

    `answers` has what was sampled in the episode, in order.
    """

    def __init__(self, client: Client, running: Callable[[], Session | None]) -> None:
        self._client, self._running = client, running
        self.answers: list[Generated] = []

    def generate(self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Generated:
        """As `Session.generate`: a turn of the episode, sampled once however often it is tried.

        Raises RuntimeError while no episode runs.
        """
        if (session := self._running()) is None:
            raise RuntimeError("no episode runs: what is sampled belongs to one, which reset() begins")
        options = {"idempotency_key": uuid.uuid4().hex, **options}
        made = retried_here(lambda: session.generate(prompt_ids, **options), _RETRY_S)
        self.answers.append(made)
        return made

    def name_turns(self, history: Iterable[dict[str, Any]]) -> None:
        """Give the steps that do not say which turn they are the `interaction_id` of the answer with their tokens.

        A `make_decision` written for ROLL notes the tokens of its answer, and no turn.
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
        """As `Session.tokenize`."""
        return self._server.tokenize(messages, **options)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """As `Session.detokenize`."""
        return self._server.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    def end_token_ids(self) -> list[int]:
        """As `Session.end_token_ids`."""
        return self._server.end_token_ids()

    def parse(self, token_ids: Sequence[int], **options: Unpack[ParseOptions]) -> dict[str, Any]:
        """As `Session.parse`."""
        return self._server.parse(token_ids, **options)

    @property
    def _server(self) -> Client | Session:
        return self._running() or self._client
