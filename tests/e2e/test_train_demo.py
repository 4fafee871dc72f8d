"""The closed training loop: the built-in model learns from exported samples, whose tokens and logprobs are exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI

from proxy.app import write_tiny_model
from proxy.serving.server import serving
from proxy.settings import Settings
from tests.e2e.processes import execute, run
from tokengrove.client import AsyncClient, Client, Export
from tokengrove.demos.train_demo import EXPORT, Round, complete, learned, training
from tokengrove.demos.trainer import RATIO_TOLERANCE, Trainer
from tokengrove.demos.word_chain import WORD_TOKENS, Game, play
from tokengrove.errors import ProxyError

SEED, UPDATES = 2, 16


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model", SEED)
    return tmp_path / "model"


@pytest.fixture
def url(tmp_path: Path, model: Path) -> Iterator[str]:
    database = f"sqlite:///{tmp_path / 't.db'}"
    settings = Settings(
        port=0,
        model=str(model),
        engine="transformers",
        engine_arg=("device=cpu",),
        database_url=database,
        log_level="warning",
    )
    with serving(settings) as url:
        yield url


async def test_the_model_learns_from_its_samples_and_each_batch_has_the_newest_weights(url: str, model: Path) -> None:
    rounds: list[Round] = [done async for done in training(url, model, SEED, updates=UPDATES, openings="t")]
    assert max(done.update.ratio_error for done in rounds) < 1e-3
    rewards = [done.update.reward for done in rounds]
    assert np.mean(rewards[:2]) < 0.12, "chance"
    assert np.mean(rewards[-3:]) > 0.25, rewards
    assert weight_version(url) == UPDATES
    with Client(url) as client:
        for done in rounds:
            samples = client.export(filter={"task_id": f"word-chain-{SEED}-{done.version}"}, layout="concat").samples
            assert {int(version) for s in samples for version in s.versions[s.loss_mask == 1]} == {done.version}
            assert np.mean([sample.rewards[0] for sample in samples]) == pytest.approx(done.update.reward)
            assert sum(int(sample.loss_mask.sum()) for sample in samples) == done.update.tokens
        assert client.claim(limit=1).sessions == {}, "every session was acknowledged"


def weight_version(url: str) -> int:
    return int(httpx.get(f"{url}/engine").json()["version"])


async def batch_at(url: str, temperature: float) -> Export:
    """Eight games, claimed."""
    async with AsyncClient(url) as client, AsyncOpenAI(base_url=url, api_key="any") as openai:
        for seed in range(8):
            await play(client, openai, Game("t", seed, "warm", "g", temperature))
        claim = await client.claim(limit=8, filter={"task_id": "warm"}, export=EXPORT)
    assert claim.export is not None and len(claim.export.samples) == 8
    return claim.export


async def test_ratios_are_1_at_any_temperature_and_any_other_ratio_stops_the_training(url: str, model: Path) -> None:
    batch = await batch_at(url, 0.6)
    assert Trainer(model).learn(batch).ratio_error < RATIO_TOLERANCE
    first = batch.samples[0]
    forged = replace(first, logprobs=np.where(first.loss_mask == 1, first.logprobs - np.float32(0.01), 0))
    with pytest.raises(ProxyError, match="ratio"):
        Trainer(model).learn(replace(batch, samples=[forged, *batch.samples[1:]]))
    turns = tuple({**turn, "sampling": {**turn["sampling"], "temperature": 1.0}} for turn in first.turns)
    with pytest.raises(ProxyError, match="ratio"):
        Trainer(model).learn(replace(batch, samples=[replace(first, turns=turns)]))


async def test_a_mask_with_half_of_its_tokens_stops_the_training(url: str) -> None:
    async with AsyncClient(url) as client, AsyncOpenAI(base_url=url, api_key="any") as openai:
        chains = [await play(client, openai, Game("t", seed, "masked", "g")) for seed in range(4)]
        claim = await client.claim(limit=4, filter={"task_id": "masked"}, export=EXPORT)
    assert claim.export is not None
    assert complete(claim.export, chains, version=0) is claim.export
    assert max(chain.tokens for chain in chains) >= WORD_TOKENS > 1, "turns of several tokens"
    first, *others = claim.export.samples
    lost = first.loss_mask.copy()
    lost[np.flatnonzero(lost)[::2]] = 0
    for samples in ([replace(first, loss_mask=lost), *others], [replace(first, loss_mask=lost * 0 + 1), *others]):
        with pytest.raises(ProxyError, match="replies had"):
            complete(replace(claim.export, samples=samples), chains, version=0)
    with pytest.raises(ProxyError, match="4 games were played"):
        complete(replace(claim.export, samples=others), chains, version=0)
    with pytest.raises(ProxyError, match="weight versions"):
        complete(claim.export, chains, version=1)


async def test_saved_and_pushed_weights_sample_the_next_turn(url: str, model: Path, tmp_path: Path) -> None:
    trainer = Trainer(model)
    trainer.learn(await batch_at(url, 1.0))
    trainer.save(tmp_path / "next")
    async with AsyncClient(url) as client:
        assert await client.update_weights(str(tmp_path / "next"), version=7, mode="drain") == 7
    async with AsyncClient(url) as client, AsyncOpenAI(base_url=url, api_key="any") as openai:
        for seed in (1, 2):
            await play(client, openai, Game("t", seed, "after", "h"))
        claim = await client.claim(limit=2, filter={"task_id": "after"}, export=EXPORT)
    assert claim.export is not None
    assert {int(each) for s in claim.export.samples for each in s.versions[s.loss_mask == 1]} == {7}
    assert trainer.learn(claim.export).ratio_error < RATIO_TOLERANCE
    with pytest.raises(ProxyError, match="ratio"):
        Trainer(model).learn(claim.export)


def test_the_model_has_learned_after_several_batches_above_the_target() -> None:
    assert not learned([0.0, 0.95, 0.97])
    assert not learned([0.99, 0.99])
    assert learned([0.1, 0.91, 0.95, 0.97])


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--seed", "1"), "--train"),
        (("--plot", "x.svg"), "--train"),
        (("--train", "--plot", "x.gif"), ".svg"),
        (("--train", "--plot", "nowhere/x.svg"), "nowhere"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path: Path, flags: tuple[str, ...], word: str) -> None:
    done = run("demo", *flags, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert word in line


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_the_demo_learns_and_draws_its_curve(tmp_path: Path) -> None:
    done = execute("demo", "--train", "--seed", "5", "--plot", "curve.svg", cwd=tmp_path, timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens and logprobs are exact" in done.stdout and "1.0 ┤" in done.stdout
    ElementTree.parse(tmp_path / "curve.svg")
