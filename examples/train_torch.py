"""Trains a small model, made on the spot, with a plain torch loop on the episodes of an agent that knows nothing of it.

The agent is examples/letters_agent.py. Each step plays groups of episodes, claims their samples, makes three passes
of the clipped objective over them, and pushes the new weights. On two cores the mean reward rises from about 0.2 to
above 0.9 within a minute. Run it from a checkout:

    python examples/train_torch.py
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
from pathlib import Path

import torch
from letters_agent import ask
from transformers import AutoModelForCausalLM

from tokengrove import AsyncClient, Export
from tokengrove.testing import serving, write_tiny_model

FIRST = ("vowel", "consonant")
GROUP_SIZE, AT_ONCE, PASSES = 16, 16, 3
CLIP, ENTROPY, LEARNING_RATE = 0.2, 0.02, 5e-3
EXPORT = {"layout": "concat", "advantages": "grpo"}


async def episode(client: AsyncClient, room: asyncio.Semaphore, step: str, first: str) -> float:
    """One session: the agent plays, and what it is worth is set."""
    async with room, client.session(step, group_id=f"{step}-{first}", group_size=GROUP_SIZE) as session:
        reward = await ask({"first": first}, session.base_url, session.api_key)
        await session.set_reward(reward)
        await session.end(outcome="Finished")
    return reward


async def play(client: AsyncClient, step: str) -> float:
    """A group of episodes for each task; return the mean reward of those that did not fail."""
    room = asyncio.Semaphore(AT_ONCE)
    episodes = [episode(client, room, step, first) for first in FIRST for _ in range(GROUP_SIZE)]
    return mean(await asyncio.gather(*episodes, return_exceptions=True))


def mean(rewards: list[float | BaseException]) -> float:
    """The mean of what did not fail. The rest is told: its sessions have ended as Failed."""
    for number, failure in enumerate(rewards):
        if isinstance(failure, BaseException):
            logging.warning("episode %d failed: %r", number, failure)
    earned = [reward for reward in rewards if not isinstance(reward, BaseException)]
    if not earned:
        raise RuntimeError("every episode of a step failed")
    return sum(earned) / len(earned)


def loss_of(model: torch.nn.Module, export: Export) -> torch.Tensor:
    """The clipped objective (Schulman et al. 2017, arXiv 1707.06347, equation 7) with an entropy bonus.

    The agent samples at temperature 1, so the logprobs of the export are those of the model's plain distribution.
    """
    batch = export.to_torch()
    ids, trained = batch["input_ids"].long(), batch["loss_mask"][:, 1:] == 1
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1][trained]
    logprobs = logits.log_softmax(-1)
    sampled = logprobs.gather(1, ids[:, 1:][trained].unsqueeze(1)).squeeze(1)
    ratio = (sampled - batch["logprobs"][:, 1:][trained]).exp()
    gains = torch.tensor([(sample.advantage or 0.0) * sample.weight for sample in export.samples])
    gain = gains.unsqueeze(1).expand_as(trained)[trained]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    return -surrogate - ENTROPY * entropy


async def train(url: str, folder: Path, steps: int) -> None:
    """Train the weights in `folder`, which the server runs; leave the new ones there, which it then runs."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    async with AsyncClient(url) as client:
        for step in range(steps):
            reward = await play(client, f"letters-{step}")
            claim = await client.claim(
                filter={"task_id": f"letters-{step}"}, limit=1000, wait_s=60, consumer="torch", export=EXPORT
            )
            assert claim.export is not None
            for _ in range(PASSES):
                optimizer.zero_grad()
                loss_of(model, claim.export).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            model.save_pretrained(folder)
            await client.update_weights(str(folder), version=step + 1)
            await client.acknowledge(claim)
            print(f"step {step:2}  mean reward {reward:.2f}  {len(claim.export.samples)} samples", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0, help="of the model's first weights")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    with tempfile.TemporaryDirectory(prefix="letters-") as scratch:
        model = Path(scratch) / "model"
        write_tiny_model(model, asked.seed)
        with serving(
            port=0,
            model=str(model),
            engine="transformers",
            engine_arg=("device=cpu",),
            database_url=f"sqlite:///{scratch}/letters.db",
            log_level="warning",
        ) as url:
            asyncio.run(train(url, model, asked.steps))


if __name__ == "__main__":
    main()
