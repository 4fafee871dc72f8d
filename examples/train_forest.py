"""Trains on shared tokens once: an agent with a long prompt and forks, exported as packed sequences (layout forest).

The agent reads a page of rules, answers, and then answers two other questions from the same point, so its session
forks. The sessions of a group share the rules, and both branches share the first answer. Each step trains two copies of
the model from the same weights: one on the samples, one on the sequences, with the attention of their trees. Their
gradients are equal, but the sequences have a fifth of the tokens. The second is served: on two cores the mean reward
rises from about 0.3 to above 0.9 in 40 steps, in about a minute. Run it from a checkout:

    python examples/train_forest.py
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from letters_agent import OTHER, QUESTIONS, is_right
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from tokengrove import AsyncClient, Export
from tokengrove.client.forest import model_inputs
from tokengrove.client.options import SampleOptions
from tokengrove.testing import serving, write_tiny_model

RULES = "Say one letter, as you are asked to. A vowel is a, e, i, o or u. All other letters are consonants. "
FIRST = ("vowel", "consonant")
GROUP_SIZE, AT_ONCE, PASSES = 16, 16, 3
CLIP, ENTROPY, LEARNING_RATE = 0.2, 0.02, 5e-3
MAX_TOKENS = 1 << 16
EXPORT: SampleOptions = {"layout": "forest", "advantages": "grpo", "max_tokens": MAX_TOKENS}


async def episode(client: AsyncClient, room: asyncio.Semaphore, step: str, first: str) -> float:
    """One session of three answers, the last two of which continue the first. The reward is the share of right ones."""
    async with room, client.session(step, group_id=f"{step}-{first}", group_size=GROUP_SIZE) as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
            begun: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": QUESTIONS[first]}]
            answer = await said(openai, begun)
            begun.append({"role": "assistant", "content": answer})
            right = [is_right(answer, first)]
            for kind in (OTHER[first], first):
                asked = [*begun, {"role": "user", "content": QUESTIONS[kind]}]
                right.append(is_right(await said(openai, asked), kind))
        reward = sum(right) / len(right)
        await session.end(reward=reward, outcome="Finished")
    return reward


async def said(openai: AsyncOpenAI, messages: list[Any]) -> str:
    reply = await openai.chat.completions.create(model="any", messages=messages, max_tokens=2)
    return reply.choices[0].message.content or ""


def objective(logits: torch.Tensor, ids: torch.Tensor, before: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    """The clipped objective (Schulman et al. 2017, arXiv 1707.06347, equation 7) of N tokens with an entropy bonus.

    `logits`: those that each token was sampled from, [N, V]. `before`: the logprobs of the export.
    """
    logprobs = logits.log_softmax(-1)
    ratio = (logprobs.gather(1, ids.unsqueeze(1)).squeeze(1) - before).exp()
    surrogate = torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains).mean()
    return -surrogate - ENTROPY * -(logprobs.exp() * logprobs).sum(-1).mean()


def loss_of_samples(model: Any, export: Export) -> torch.Tensor:
    """The loss of all samples, each alone in its row."""
    batch = export.to_torch()
    ids, trained = batch["input_ids"].long(), batch["loss_mask"][:, 1:] == 1
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1][trained]
    gains = torch.tensor([sample.advantage or 0.0 for sample in export.samples])
    before = batch["logprobs"][:, 1:][trained]
    return objective(logits, ids[:, 1:][trained], before, gains.unsqueeze(1).expand_as(trained)[trained])


def loss_of_sequence(model: Any, export: Export) -> torch.Tensor:
    """The same loss of the samples in one sequence: the logits of a token are those of its parent."""
    [sequence] = export.sequences
    trained = torch.from_numpy(sequence.loss_mask > 0)
    logits = model(**model_inputs(sequence)).logits[0]
    gains = torch.from_numpy(sequence.extra["advantages"])[trained]
    ids, before = torch.from_numpy(sequence.input_ids).long(), torch.from_numpy(sequence.logprobs)
    parents = torch.from_numpy(sequence.parent).long()[trained]
    return objective(logits[parents], ids[trained], before[trained], gains)


class Learner:
    """A copy of the model, and how it computes its loss.

    `gradient`: that of the first pass of its last step, of all weights; `seconds`: those of the step.
    """

    def __init__(self, model: Any, loss: Callable[[Any, Export], torch.Tensor]) -> None:
        self.model, self._loss, self.seconds = copy.deepcopy(model), loss, 0.0
        self.gradient = torch.zeros(0)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE)

    def learn(self, export: Export) -> None:
        begun = time.perf_counter()
        for number in range(PASSES):
            self._optimizer.zero_grad()
            self._loss(self.model, export).backward()
            if number == 0:
                found = [each.grad.reshape(-1) for each in self.model.parameters() if each.grad is not None]
                self.gradient = torch.cat(found).clone()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
        self.seconds = time.perf_counter() - begun

    def follow(self, other: Learner) -> None:
        """Begin where another copy is."""
        self.model.load_state_dict(other.model.state_dict())
        self._optimizer.load_state_dict(other._optimizer.state_dict())

    def apart(self, other: Learner) -> float:
        """The norm of the difference of the gradients, as a share of their norm."""
        return ((self.gradient - other.gradient).norm() / self.gradient.norm()).item()


async def train(url: str, folder: Path, steps: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="sdpa", local_files_only=True
    )
    rows, forest = Learner(model, loss_of_samples), Learner(model, loss_of_sequence)
    async with AsyncClient(url) as client:
        for step in range(steps):
            room, task_id = asyncio.Semaphore(AT_ONCE), f"letters-{step}"
            played = [episode(client, room, task_id, first) for first in FIRST for _ in range(GROUP_SIZE)]
            rewards = await asyncio.gather(*played)
            claim = await client.claim(filter={"task_id": task_id}, limit=1000, consumer="torch", export=EXPORT)
            assert claim.export is not None
            counts = claim.export.forest
            rows.follow(forest)
            rows.learn(Export([sample for each in claim.export.sequences for sample in each.samples()], {}))
            forest.learn(claim.export)
            forest.model.save_pretrained(folder)
            await client.update_weights(str(folder), version=step + 1)
            await client.acknowledge(claim)
            print(
                f"step {step:2}  mean reward {sum(rewards) / len(rewards):.2f}  "
                f"rows {counts['row_tokens']} tokens {rows.seconds:.2f} s  "
                f"forest {counts['tokens']} tokens {forest.seconds:.2f} s  gradients apart {rows.apart(forest):.1e}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
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
