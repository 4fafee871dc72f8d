"""The whole training loop: agents play against the server; a trainer claims their samples and pushes new weights.

They exchange only HTTP requests and a folder of weights. The trainer takes tokens, mask, logprobs, advantages and
weights from the export. Training is on-policy: the newest weights alone sample each batch, and it is trained on once.
The weight versions of its tokens are checked. The mask of each sample must have as many tokens as the replies to the
agent report.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tokengrove.client import AsyncClient, Export
from tokengrove.client.options import SampleOptions
from tokengrove.demos.curve import html_page, svg_curve, text_curve, text_figure
from tokengrove.demos.trainer import Trainer, TrainingStep
from tokengrove.demos.word_chain import OPENINGS, Chain, Game, play
from tokengrove.errors import ConfigurationError, ProxyError, how_to_get

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TARGET = 0.9
_BATCHES_ABOVE = 3
"""Consecutive batches that must be above the target; a single batch may be luck."""
MOST_UPDATES = 120
"""Two to three times the usual number. A run that has not succeeded by then will not succeed."""
GROUP_SIZE = 16
_IN_FLIGHT = 16
"""Concurrent games: enough for the engine to batch, few enough for the HTTP clients to stay fast."""
_LINE_EVERY = 5
EXPORT: SampleOptions = {"layout": "concat", "advantages": "grpo"}
"""The export that the trainer claims: one sample per conversation, with its advantage within its group."""
_PICTURES = (".svg", ".html")
TITLE = "Mean reward of the word chain"


@dataclass(frozen=True, slots=True)
class Round:
    """One batch: the weight version that sampled it, its training step, and its games."""

    version: int
    update: TrainingStep
    chains: tuple[Chain, ...]


def check_plot(path: Path | None) -> None:
    """Raise ConfigurationError if the plot cannot be written to `path`, before minutes of training."""
    if path is not None and path.suffix not in _PICTURES:
        raise ConfigurationError(
            f"--plot {path} is neither an .svg nor an .html file; give a name with one of these endings"
        )
    if path is not None and not path.parent.is_dir():
        raise ConfigurationError(f"--plot {path}: the folder {path.parent} does not exist; create it first")


def run_train_demo(url: str, model: Path, console: Console, *, seed: int = 0, plot: Path | None = None) -> None:
    """Train the model that the server at `url` serves from folder `model` until its reward is high, with progress.

    Raises ConfigurationError if a package is missing, and ProxyError if a first importance ratio is not 1 or the reward
    stays low.
    """
    check_plot(plot)
    rounds: list[Round] = []
    started = time.monotonic()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        _explain(console, INTRODUCTION)

        def show(done: Round) -> None:
            rounds.append(done)
            if done.version % _LINE_EVERY == 0:
                console.print(_line(done), soft_wrap=True)
            live.update(Group(Text(text_curve(_rewards(rounds)), "green"), _line(done)), refresh=True)

        asyncio.run(_train(url, model, seed, show))
    took_s = time.monotonic() - started
    if plot is not None:
        plot.write_text(_picture(plot.suffix, _rewards(rounds), seed), encoding="utf-8")
        _explain(console, f"\nThe plot is in {plot}.")
    _conclude(console, rounds, took_s)


async def _train(url: str, model: Path, seed: int, show: Callable[[Round], None]) -> None:
    rounds: list[Round] = []
    async with aclosing(training(url, model, seed)) as running:
        async for done in running:
            show(done)
            rounds.append(done)
            if learned(_rewards(rounds)):
                return
    raise ProxyError(
        f"the mean reward is {rounds[-1].update.reward:.2f} after {len(rounds)} updates; try another --seed"
    )


def learned(rewards: Sequence[float]) -> bool:
    """True if the last `_BATCHES_ABOVE` batches were all above the target."""
    latest = rewards[-_BATCHES_ABOVE:]
    return len(latest) == _BATCHES_ABOVE and min(latest) > TARGET


async def training(
    url: str, model: Path, seed: int, *, updates: int = MOST_UPDATES, openings: str = OPENINGS
) -> AsyncGenerator[Round, None]:
    """Yield rounds of playing and training, at most `updates`. The server must serve `model` as weight version 0.

    Raises ConfigurationError if a package is missing, and ProxyError if the exported samples are not those of the
    round.
    """
    for package in ("openai", "torch", "transformers"):
        if find_spec(package) is None:
            raise ConfigurationError(f"training needs the package {package}: {how_to_get(package)}")
    from openai import AsyncOpenAI

    trainer, dice = Trainer(model), random.Random(seed)
    async with AsyncClient(url) as client, AsyncOpenAI(base_url=url, api_key="of each session") as openai:
        for version in range(updates):
            task_id = f"word-chain-{seed}-{version}"
            chains = await _play_all(client, openai, _games(task_id, openings, dice))
            claim = await client.claim(
                filter={"task_id": task_id}, limit=len(chains), consumer="trainer", export=EXPORT
            )
            update = trainer.learn(complete(claim.export, chains, version))
            with tempfile.TemporaryDirectory(prefix="tokengrove-weights-") as folder:
                trainer.save(Path(folder))
                await client.update_weights(folder, version=version + 1)
            await client.acknowledge(claim)
            yield Round(version, update, tuple(chains))


def _games(task_id: str, openings: str, dice: random.Random) -> list[Game]:
    """One group of games per opening."""
    return [
        Game(opening, dice.getrandbits(31), task_id, f"{task_id}-{opening}")
        for opening in openings
        for _ in range(GROUP_SIZE)
    ]


async def _play_all(client: AsyncClient, openai: AsyncOpenAI, games: Sequence[Game]) -> list[Chain]:
    room = asyncio.Semaphore(_IN_FLIGHT)

    async def admitted(game: Game) -> Chain:
        async with room:
            return await play(client, openai, game)

    return list(await asyncio.gather(*map(admitted, games)))


def complete(batch: Export | None, chains: Sequence[Chain], version: int) -> Export:
    """Return the batch after checking that it trains exactly the tokens that were sampled in these games.

    Raises ProxyError if a game is missing, if a sample trains fewer or more tokens than its replies had, or if a token
    has another weight version.
    """
    samples = [] if batch is None else batch.samples
    if batch is None or len(samples) != len(chains):
        raise ProxyError(f"{len(chains)} games were played, but {len(samples)} samples were claimed")
    sampled = {chain.session_id: chain.tokens for chain in chains}
    for sample in samples:
        trained, told = int(sample.loss_mask.sum()), sampled.get(sample.session_id)
        if trained != told:
            raise ProxyError(
                f"the mask of session {sample.session_id!r} trains {trained} tokens, but the agent's replies had {told}"
            )
    versions = np.unique(np.concatenate([sample.versions[sample.loss_mask == 1] for sample in samples]))
    if versions.tolist() != [version]:
        raise ProxyError(f"the samples were sampled by weight versions {versions.tolist()}, not by {version} alone")
    return batch


def _rewards(rounds: Sequence[Round]) -> list[float]:
    return [done.update.reward for done in rounds]


def _line(done: Round) -> Text:
    update = done.update
    reward = f"version {done.version:3}  reward {update.reward:.2f}  "
    ratio = f"first ratio 1 ± {update.ratio_error:.0e}  {update.tokens} tokens  "
    return Text.assemble(reward, (ratio, "dim"), (_shown(done.chains[0]), "cyan"))


def _shown(chain: Chain) -> str:
    """A game as one line, with unprintable characters, which random bytes can contain, as dots."""
    words = [f"{word} {'✓' if reward else '✗'}" for word, reward in zip(chain.words, chain.rewards, strict=True)]
    text = " → ".join([f"{chain.opening}:", *words]).replace(": →", ":")
    return "".join(character if character.isprintable() and character != "\ufffd" else "·" for character in text)


def _conclude(console: Console, rounds: Sequence[Round], took_s: float) -> None:
    rewards, last = _rewards(rounds), rounds[-1]
    farthest = max(done.update.ratio_error for done in rounds)
    _explain(console, "\nWhat the last weights play, one game for each letter:\n")
    for chain in last.chains[::GROUP_SIZE]:
        console.print(Text(f"  {_shown(chain)}", "cyan"), soft_wrap=True)
    _explain(
        console,
        f"\nThe first ratio of every batch was 1 within {farthest:.0e}: the exported tokens and logprobs are exact.\n"
        "The mask of every sample had as many tokens as the agent was told were sampled.\n",
    )
    title = (
        f"Mean reward: {rewards[0]:.2f} with random weights, {rewards[-1]:.2f} after {last.version} updates of "
        f"{len(last.chains)} games, in {took_s:.0f} s"
    )
    _explain(console, text_figure(rewards, title, "weight version"))


def _explain(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _picture(suffix: str, rewards: Sequence[float], seed: int) -> str:
    svg = svg_curve(rewards, f"{TITLE}, seed {seed}", "weight version", "mean reward of a batch", TARGET)
    return svg if suffix == ".svg" else html_page(svg, TITLE)


INTRODUCTION = f"""\
The word chain: the agent says a letter, the model answers with a word of up to two tokens that begins with
it, then the same with the last letter of that word. Its weights are random at first, so it is right by
chance. A trainer claims what was played, learns from it and pushes new weights, until {_BATCHES_ABOVE} batches in a row
have a mean reward above {TARGET}: two to three minutes on two cores.

A line for each fifth batch: its first ratio is the trainer's probability of a token before the update, divided
by the recorded one (the farthest from 1), and its game is one of {len(OPENINGS) * GROUP_SIZE}.
"""
