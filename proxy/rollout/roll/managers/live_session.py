"""The session of whichever episode runs, for what outlives an episode: tokenizers and proxies of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from proxy.client import Client, Session
from proxy.client.options import GenerateOptions, ParseOptions
from proxy.client.values import Generated
from proxy.rollout.retries import retried_here

_RETRY_S = 60.0
"""How long a call is tried again while the server restarts. The server samples a repeated call once."""


class LiveSession:
    """`running()` is the session of the running episode, or None; `client` tokenizes while there is none."""

    def __init__(self, client: Client, running: Callable[[], Session | None]) -> None:
        self._client, self._running = client, running

    def generate(self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Generated:
        """As `Session.generate`: a turn of the episode. Raises RuntimeError while none runs."""
        if (session := self._running()) is None:
            raise RuntimeError("no episode runs: what is sampled belongs to one, which reset() begins")
        return retried_here(lambda: session.generate(prompt_ids, **options), _RETRY_S)

    def tokenize(self, messages: Any, **options: Any) -> list[int]:
        """As `Session.tokenize`."""
        return retried_here(lambda: self._server.tokenize(messages, **options), _RETRY_S)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """As `Session.detokenize`."""
        return retried_here(
            lambda: self._server.detokenize(token_ids, skip_special_tokens=skip_special_tokens), _RETRY_S
        )

    def end_token_ids(self) -> list[int]:
        """As `Session.end_token_ids`."""
        return retried_here(lambda: self._server.end_token_ids(), _RETRY_S)

    def parse(self, token_ids: Sequence[int], **options: Unpack[ParseOptions]) -> dict[str, Any]:
        """As `Session.parse`."""
        return retried_here(lambda: self._server.parse(token_ids, **options), _RETRY_S)

    @property
    def _server(self) -> Client | Session:
        return self._running() or self._client
