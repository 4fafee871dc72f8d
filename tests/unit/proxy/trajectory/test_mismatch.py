"""The mismatch between samplers and trainers: sums against a loop over tokens, and which samplers are named."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.trajectory.mismatch import CLIPPED, LOGPROBS, MASKED, Drawn, Mismatch, Part, parts_of
from proxy.trajectory.told import Output
from proxy.types import Sampler

GOOD, BAD = Sampler("http://good", "bfloat16"), Sampler("http://bad", "bfloat16", "fp8")
VOCABULARY, TOKENS = 64, 24
Noise = Callable[[np.random.Generator, Any], Any]


@st.composite
def outputs(draw: st.DrawFn) -> tuple[Output, dict[str, Any]]:
    tokens = draw(st.integers(1, 12))
    cuts = sorted(draw(st.sets(st.integers(1, tokens), max_size=3)) | {tokens})
    versions = tuple((end - start, draw(st.integers(0, 3))) for start, end in zip([0, *cuts], cuts, strict=False))
    starts = [0, *sorted(draw(st.sets(st.integers(1, 11), max_size=2)))]
    samplers = tuple((start, draw(st.sampled_from([GOOD, BAD]))) for start in starts if start < tokens)
    value = st.one_of(st.just(math.nan), st.floats(-9, 0, width=32))
    flag = st.sampled_from([math.nan, 0.0, 1.0])
    kinds = {LOGPROBS: value, MASKED: flag, CLIPPED: flag, "entropy": value}
    names = draw(st.sets(st.sampled_from(sorted(kinds)), min_size=1))
    streams = {
        name: np.array(draw(st.lists(kinds[name], min_size=tokens, max_size=tokens)), np.float32) for name in names
    }
    sampled = np.array(draw(st.lists(st.floats(-9, 0, width=32), min_size=tokens, max_size=tokens)), np.float32)
    known = sampled if draw(st.booleans()) else None
    return Output("s", "i", 5, tokens, known, versions, draw(st.sampled_from([(), samplers]))), streams


@settings(max_examples=200)
@given(outputs())
def test_parts_have_the_sums_over_their_tokens(given: tuple[Output, dict[str, Any]]) -> None:
    output, streams = given
    version = [number for count, number in output.versions for _ in range(count)]
    samplers = dict(output.samplers or ((0, Sampler()),))
    sampler = [samplers[max(start for start in samplers if start <= at)] for at in range(output.tokens)]
    found = parts_of(output, streams)
    edges = {part.first for part in found}
    assert len(edges) == len(found)
    told: dict[int, list[Any]] = {}
    for at in range(output.tokens):
        values = {name: float(stream[at]) for name, stream in streams.items() if not math.isnan(stream[at])}
        first = max(k for k in range(at + 1) if k == 0 or (version[k], sampler[k]) != (version[k - 1], sampler[k - 1]))
        starts = [k for k, _ in output.samplers or ()]
        first = max([first, *(k for k in starts if k <= at)])
        run = 0
        for count, _ in output.versions:
            if run <= at:
                first = max(first, run)
            run += count
        if values:
            told.setdefault(first, []).append((at, values))
    assert edges == told.keys()
    for part in found:
        tokens = told[part.first]
        assert (part.version, part.sampler) == (version[part.first], sampler[part.first])
        assert part.tokens == len(tokens)
        assert part.masked == sum(values.get(MASKED) == 1 for _, values in tokens)
        assert part.clipped == sum(values.get(CLIPPED) == 1 for _, values in tokens)
        pairs = [
            (values[LOGPROBS], float(output.logprobs[at]))
            for at, values in tokens
            if LOGPROBS in values and output.logprobs is not None
        ]
        assert part.compared == len(pairs)
        assert part.kl == pytest.approx(sum(math.exp(t - s) - 1 - (t - s) for t, s in pairs), abs=1e-9)
        assert part.log_ratio == pytest.approx(max((abs(t - s) for t, s in pairs), default=0.0))


def log_softmax(logits: Any) -> Any:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def played(mismatch: Mismatch, rng: np.random.Generator, sampler: Sampler, wrong: Noise, own: Noise) -> None:
    """A turn: `sampler` draws from its distribution, `wrong` of the true one; the trainer has `own` of it."""
    logits = rng.normal(0, 2, (TOKENS, VOCABULARY))
    drawn = log_softmax(wrong(rng, logits))
    ids = (drawn.cumsum(-1) * 0 + np.exp(drawn).cumsum(-1) > rng.random((TOKENS, 1))).argmax(-1)
    at = np.arange(TOKENS)
    sampled, trained = drawn[at, ids].astype(np.float32), log_softmax(own(rng, logits))[at, ids].astype(np.float32)
    output = Output("s", "i", 0, TOKENS, sampled, ((TOKENS, 3),), ((0, sampler),))
    mismatch.add("t", parts_of(output, {LOGPROBS: trained}))


def rounding(rng: np.random.Generator, logits: Any) -> Any:
    """Kernels of trainers and engines differ by about this much in bfloat16."""
    return logits + rng.normal(0, 0.01, logits.shape)


PLANTS: dict[str, Noise] = {
    "temperature": lambda rng, logits: rounding(rng, logits) / 1.15,
    "stale": lambda rng, logits: rounding(rng, logits) + np.sin(np.arange(VOCABULARY)) * 0.15,
    "fp8": lambda rng, logits: logits + rng.normal(0, 0.08, logits.shape),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("seed", range(3))
def test_one_of_two_servers_that_is_wrong_is_named_within_200_turns(plant: str, seed: int) -> None:
    mismatch, rng = Mismatch(0.01), np.random.default_rng(seed)
    for turn in range(200):
        bad = turn % 2 == 1
        played(mismatch, rng, BAD if bad else GOOD, PLANTS[plant] if bad else rounding, rounding)
        assert GOOD not in [key.sampler for key in mismatch.named()]
    assert mismatch.named() == [Drawn("t", BAD)]


def test_a_single_server_far_above_the_limit_is_named() -> None:
    mismatch, rng = Mismatch(0.01), np.random.default_rng(0)
    for _ in range(100):
        played(mismatch, rng, BAD, lambda rng, logits: logits / 1.5, rounding)
    assert mismatch.named() == [Drawn("t", BAD)]


def test_a_server_that_is_mended_is_named_no_longer() -> None:
    mismatch, rng = Mismatch(0.01), np.random.default_rng(0)
    for turn in range(900):
        bad = turn % 2 == 1
        wrong = PLANTS["temperature"] if bad and turn < 300 else rounding
        played(mismatch, rng, BAD if bad else GOOD, wrong, rounding)
        if turn == 299:
            assert mismatch.named() == [Drawn("t", BAD)]
    assert mismatch.named() == []


@pytest.mark.parametrize(
    ("own", "limit"),
    [
        (rounding, 0.002),
        (lambda rng, logits: logits + rng.normal(0, 1, logits.shape) * (rng.random((TOKENS, 1)) < 0.02), 0.05),
        (lambda rng, logits: logits + rng.standard_t(2, logits.shape) * 0.01, 0.01),
    ],
    ids=["rounding", "outliers", "heavy tails"],
)
def test_no_server_is_named_in_5000_turns_on_equal_servers(own: Noise, limit: float) -> None:
    mismatch, rng = Mismatch(limit), np.random.default_rng(1)
    servers = [Sampler(f"http://{at}") for at in range(4)]
    for turn in range(5000):
        played(mismatch, rng, servers[turn % 4], rounding, own)
        if turn % 5 == 0:
            assert mismatch.named() == []
    assert limit / 50 < min(seen.kl for seen in mismatch.seen.values()) < limit / 2, "the servers are compared"


def test_a_sampler_is_compared_with_the_best_of_the_others_of_its_trainer() -> None:
    mismatch = Mismatch(1.0)
    levels = {"good": 0.001, "equal": 0.001, "bad": 0.2}
    for turn in range(60):
        for name, kl in levels.items():
            noise = 1e-5 * (turn % 3)
            mismatch.add("t", [Part(0, 1, Sampler(name), 1, 0, 0, 1, kl + noise, kl)])
        mismatch.add("other", [Part(0, 1, Sampler("alone"), 1, 0, 0, 1, 0.5, 0.5)])
    assert mismatch.named() == [Drawn("t", Sampler("bad"))]
    seen = mismatch.seen[Drawn("t", Sampler("bad"))]
    assert seen.kl == pytest.approx(np.mean([kl for kl, _, _ in seen.turns]))
    assert seen.error == pytest.approx(np.std([kl for kl, _, _ in seen.turns], ddof=1) / math.sqrt(len(seen.turns)))


def test_few_turns_name_nobody() -> None:
    mismatch, rng = Mismatch(0.01), np.random.default_rng(0)
    for _ in range(19):
        played(mismatch, rng, BAD, lambda rng, logits: logits / 3, rounding)
    assert mismatch.named() == []
    assert mismatch.seen[Drawn("t", BAD)].version == 3


def test_memory_is_bounded_over_many_servers() -> None:
    mismatch = Mismatch(0.01)
    for at in range(1000):
        mismatch.add("t", [Part(0, 1, Sampler(f"http://{at}"), 1, 0, 0, 1, 0.0, 0.0)])
    assert len(mismatch.seen) == 256
    assert Drawn("t", Sampler("http://999")) in mismatch.seen
