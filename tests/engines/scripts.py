"""A deterministic script that depends on all tokens so far, like a model.

So a reply that was interrupted and continued elsewhere must equal one that was not.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.scripts import Reply, Script
from proxy.types import ids_of

VOCABULARY = 640
_SPAN = 600  # below the markers of the built-in tokenizer
_LONG = 500


def following(tokens: Sequence[int], count: int, seed: int = 0, stops: Sequence[int] = ()) -> list[int]:
    """The `count` tokens that follow `tokens`, up to and including the first of `stops`."""
    last, length, out = tokens[-1], len(tokens), []
    for _ in range(count):
        last = (last * 31 + length * 17 + seed * 7 + 5) % _SPAN
        length += 1
        out.append(last)
        if last in stops:
            break
    return out


def model_like(delay_s: float = 0.0, chunk: int = 1) -> Script:
    """The script of `following`; long replies take at least 1 ms per chunk, so that tests can interrupt them."""

    def script(request: GenerateRequest) -> Reply:
        most = request.sampling.max_tokens or 0
        stops = () if request.sampling.ignore_eos else request.stop_token_ids
        ids = following(request.input_ids, most, request.sampling.seed or 0, stops)
        return Reply(ids_of(ids), chunk, delay_s or (0.001 if most >= _LONG else 0.0))

    return script
