"""Self-play: a policy learns a game against a frozen copy of its first weights, both behind one address.

A table of models gives the server two: `policy`, which is trained, and `opponent`, which never changes. The game,
examples/nim_game.py, knows two seats; each session binds them to the two models, and each of them begins as often. Both
players' turns are in the session, but the claim has the samples of the policy only. The loop checks that they train all
tokens of the policy and none of the opponent. The objective is that of examples/grpo_step.py with an entropy bonus.

On two cores the win rate rises from 0.5 to about 0.8 in two minutes. Run it from a checkout:

    python examples/two_players.py

With `--shuffle-rewards`, the wins of each step are dealt out to its games by chance, so there is nothing to learn. With
`--adapter`, the policy is a LoRA adapter, and each step publishes a version of it (`pip install peft`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from grpo_step import grpo_loss
from nim_game import PILES, SEATS, play
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from tokengrove import AsyncClient, AsyncSession, Export
from tokengrove.client.options import SampleOptions, SessionOptions
from tokengrove.testing import serving, write_tiny_model

GROUP_SIZE, AT_ONCE, PASSES = 24, 48, 3
ENTROPY = 0.02
LEARNING_RATE = {"weights": 7e-3, "adapter": 3e-3}
LATEST = 5
EXPORT: SampleOptions = {"layout": "concat", "advantages": "grpo"}


@dataclass(frozen=True)
class Played:
    """A finished game of the policy. `won`: 1.0 or 0.0. `tokens`: how many each model sampled, by its name."""

    session: AsyncSession
    won: float
    tokens: dict[str, int]


class Arena:
    """Plays games of the policy against the opponent, `AT_ONCE` at a time."""

    def __init__(self, client: AsyncClient, openai: AsyncOpenAI) -> None:
        self._client, self._openai = client, openai
        self._room = asyncio.Semaphore(AT_ONCE)

    async def games(self, task_id: str, of_each: int, **options: Unpack[SessionOptions]) -> list[Played]:
        """Play `of_each` games for each pile and seat of the policy, each as a session of a group. They stay open."""
        kinds = [(pile, seat) for pile in PILES for seat in SEATS for _ in range(of_each)]
        return await asyncio.gather(*[self._game(task_id, pile, seat, of_each, options) for pile, seat in kinds])

    async def _game(self, task_id: str, pile: int, seat: str, size: int, options: SessionOptions) -> Played:
        models = {each: "policy" if each == seat else "opponent" for each in SEATS}
        group_id = f"{task_id}-{pile}-{seat}"
        async with self._room:
            options = {"models": models, "group_id": group_id, "group_size": size, **options}
            session = await self._client.start_session(task_id, **options)
            game = await play(pile, self._openai, session.base_url, session.api_key)
        tokens = {models[each]: count for each, count in game.tokens.items()}
        return Played(session, float(game.winner == seat), tokens)


async def reward(games: Sequence[Played], rewards: Sequence[float]) -> None:
    """End the sessions of games with their rewards, which the last turn of the policy gets."""
    for game, value in zip(games, rewards, strict=True):
        await game.session.end(reward=value, outcome="Finished")


def trained_tokens(export: Export, games: Sequence[Played]) -> Counter[str]:
    """The number of trained tokens of each model. Raises AssertionError unless they are those of the policy, all."""
    counts: Counter[str] = Counter()
    for sample in export.samples:
        counts[str(sample.route)] += int(sample.loss_mask.sum())
    assert counts == {"policy": sum(game.tokens["policy"] for game in games)}, counts
    return counts


class Learner:
    """The policy in training. `publish` makes the server answer with it."""

    def __init__(self, folder: Path, scratch: Path, adapter: bool) -> None:
        self._scratch, self._adapter = scratch, adapter
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
        if adapter:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
            self._model = get_peft_model(self._model, lora)
        weights = [each for each in self._model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.Adam(weights, LEARNING_RATE["adapter" if adapter else "weights"])

    def learn(self, export: Export) -> None:
        for _ in range(PASSES):
            self._optimizer.zero_grad()
            grpo_loss(self._model, export, ENTROPY)[0].backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()

    async def publish(self, client: AsyncClient, version: int) -> None:
        """Save the weights in a new folder, not over those of the opponent, and have the server load them."""
        folder = str(self._scratch / f"policy-{version}")
        self._model.save_pretrained(folder)
        if self._adapter:
            await client.publish_adapter(folder, version=version)
        else:
            await client.update_weights(folder, version=version)


async def train(url: str, learner: Learner, asked: argparse.Namespace) -> None:
    dice, rates = random.Random(asked.seed), list[float]()
    async with AsyncClient(url) as client, AsyncOpenAI(base_url=url, api_key="of each session") as openai:
        arena = Arena(client, openai)
        if asked.adapter:
            await learner.publish(client, 1)  # until then, the policy answers with 503
        for step in range(asked.steps):
            task_id = f"nim-{step}"
            games = await arena.games(task_id, GROUP_SIZE)
            rewards = [game.won for game in games]
            rates.append(sum(rewards) / len(rewards))
            if asked.shuffle_rewards:
                dice.shuffle(rewards)
            await reward(games, rewards)
            claim = await client.claim(filter={"task_id": task_id}, limit=len(games), consumer="torch", export=EXPORT)
            assert claim.export is not None
            trained = trained_tokens(claim.export, games)
            learner.learn(claim.export)
            await learner.publish(client, step + 1 + asked.adapter)
            await client.acknowledge(claim)
            sampled = sum(game.tokens["opponent"] for game in games)
            print(row(step, rates, trained, sampled), flush=True)
            if latest(rates) > asked.until:
                break
        games = await arena.games("evaluation", asked.games // len(PILES) // len(SEATS), delivery="runner")
        await reward(games, [game.won for game in games])
        rate = sum(game.won for game in games) / len(games)
        print(f"final win rate {rate:.3f} of {len(games)} games against the frozen opponent", flush=True)


def latest(rates: Sequence[float]) -> float:
    """The mean of the last steps."""
    newest = rates[-LATEST:]
    return sum(newest) / len(newest)


def row(step: int, rates: Sequence[float], trained: Counter[str], sampled: int) -> str:
    return (
        f"step {step:2}  win rate {rates[-1]:.2f}  last {LATEST} {latest(rates):.2f}  "
        f"policy: {trained['policy']} tokens, all trained  opponent: {sampled} tokens, {trained['opponent']} trained"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--until", type=float, default=1.0, help="end earlier, above this mean of the last steps")
    parser.add_argument("--seed", type=int, default=0, help="of the models' first weights")
    parser.add_argument("--games", type=int, default=400, help="of the evaluation at the end")
    parser.add_argument("--shuffle-rewards", action="store_true", help="the control: rewards that say nothing")
    parser.add_argument("--adapter", action="store_true", help="train a LoRA adapter")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="two-players-") as scratch:
        model = Path(scratch) / "model"
        write_tiny_model(model, asked.seed)
        models = {"policy": {"lora": asked.adapter}, "opponent": {"kind": "frozen", "model": str(model)}}
        with serving(
            port=0,
            model=str(model),
            models=json.dumps(models),
            engine="transformers",
            engine_arg=("device=cpu",),
            database_url=f"sqlite:///{scratch}/nim.db",
            log_level="warning",
        ) as url:
            asyncio.run(train(url, Learner(model, Path(scratch), asked.adapter), asked))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
