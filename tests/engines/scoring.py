"""Requests for the logprobs of prompts, and the comparison of what an engine gives with an own forward pass."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.callbacks import CallbackEngine
from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import request_for
from proxy.engine.requests import GenerateRequest
from proxy.types import Ids, ids_of
from tests.adapters import adapted_model, adapter_logprobs
from tests.engines.pictures import Prompts, asks, drawn, seen_logprobs
from tokengrove.reasons import FinishReason

TOLERANCE = 1e-4
_WORDS = 600
"""Tokens below the markers of the built-in tokenizer."""

_sessions = itertools.count()


def tokens(seed: int, count: int) -> Ids:
    """`count` random tokens."""
    return ids_of(random.Random(seed).choices(range(_WORDS), k=count))


def scoring(prompt: Ids, first: int = 1, top: int = 0, adapter: int | None = None) -> GenerateRequest:
    """A request for the logprobs of the tokens of `prompt` from position `first` on."""
    request = replace(request_for(prompt, 1), scored_from=first, top_logprobs=top, whole=True, adapter=adapter)
    return replace(request, session_id=f"scored-{next(_sessions)}")


async def scored(engine: CallbackEngine, request: GenerateRequest) -> TokenChunk:
    """The chunk of the answer that has the logprobs of the prompt; one token is sampled after it.

    A request that a pause ends is sent again, as by the gate.
    """
    chunks, finish = list[TokenChunk](), FinishReason.ABORT
    while finish is FinishReason.ABORT:
        chunks.clear()
        finish = await engine.sample(request, chunks.append)
    assert finish is FinishReason.LENGTH
    assert sum(len(chunk.ids) for chunk in chunks) == 1
    (found,) = [chunk for chunk in chunks if chunk.prompt_logprobs is not None]
    return found


async def check_scored(
    engine: CallbackEngine, request: GenerateRequest, model: Path, adapter: Path | None = None
) -> TokenChunk:
    """Assert that `engine` gives the logprobs of an own forward pass, with the likeliest alternatives."""
    chunk, first = await scored(engine, request), request.scored_from or 0
    prompt = request.input_ids
    assert chunk.prompt_logprobs is not None
    expected = adapter_logprobs(model, adapter, prompt[:first], prompt[first:])
    assert list(chunk.prompt_logprobs) == pytest.approx(expected, abs=TOLERANCE)
    if request.top_logprobs:
        check_alternatives(chunk.prompt_top, model, adapter, prompt, first, request.top_logprobs)
    else:
        assert chunk.prompt_top == ()
    return chunk


def check_alternatives(
    tops: Sequence[Sequence[tuple[int, float]]], model: Path, adapter: Path | None, prompt: Ids, first: int, count: int
) -> None:
    """Assert that `tops` has the `count` likeliest tokens of each position from `first` on, likeliest first."""
    import torch

    with torch.no_grad():
        logits = adapted_model(model, adapter)(torch.tensor([list(prompt)]), use_cache=False).logits[0, first - 1 : -1]
    logprobs = logits.log_softmax(-1)
    assert len(tops) == len(logprobs)
    for top, row in zip(tops, logprobs, strict=True):
        assert [value for _, value in top] == pytest.approx(row.topk(count).values.tolist(), abs=TOLERANCE)
        assert [value for _, value in top] == pytest.approx([float(row[token]) for token, _ in top], abs=TOLERANCE)


async def check_scored_after_images(engine: CallbackEngine, folder: Path, tolerance: float) -> None:
    """Assert that the tokens after two images have the logprobs of a forward pass that sees them, also if cached."""
    images = drawn(1), drawn(3, 300, 80)
    ids, placed = Prompts(folder).of("Look: ", images[0], " and then ", images[1], " What is it? It is red.")
    after = placed[-1].start + placed[-1].length
    for first in (after, after + 1, len(ids) - 3):
        request = replace(asks(ids, placed, images, 1), scored_from=first, top_logprobs=2, whole=True)
        chunk = await scored(engine, request)
        expected = seen_logprobs(folder, ids[:first], images, ids[first:])
        assert list(chunk.prompt_logprobs or ()) == pytest.approx(expected, abs=tolerance)
        assert [len(top) for top in chunk.prompt_top] == [2] * len(expected)
    expected = seen_logprobs(folder, ids[:after], images, ids[after:])
    others = seen_logprobs(folder, ids[:after], (drawn(2), images[1]), ids[after:])
    assert max(abs(one - other) for one, other in zip(others, expected, strict=True)) > 0.01
