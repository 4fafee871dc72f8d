"""Trains a small mixture-of-experts model on answers that are sampled with top_p and top_k, with replay columns.

The agent is examples/letters_agent.py; it knows nothing of the training. The server records for each sampled token the
ids that truncation left, and for each token the experts that it was routed to. Before each step, the loop compares the
first ratio (the trainer's probability of a sampled token by that of the sampler; the weights are equal) and the KL
divergence with both columns, without one of them, and without both.

The trainer differs from the sampler, as real ones do: it computes whole padded batches, with another attention kernel,
and its routers choose by scores rounded to bfloat16. On one machine in float32, nothing else would make them choose
other experts. All else is float32, so what remains with replay is rounding. On two cores a step takes a few seconds.
Run it from a checkout:

    python examples/train_replay.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from letters_agent import ask
from replay_experts import replayed_experts, routers_of
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tokengrove import AsyncClient, Export, Sample
from tokengrove.client.kept_sets import KeptSets
from tokengrove.client.options import SampleOptions
from tokengrove.testing import serving, write_tiny_model

SAMPLING = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}
KINDS = ("vowel", "consonant")
GROUP_SIZE, AT_ONCE, PASSES = 16, 16, 3
CLIP, LEARNING_RATE = 0.2, 3e-3
EXPORT: SampleOptions = {"layout": "concat", "advantages": "grpo", "format": "npz", "replay": ["kept", "experts"]}
WAYS = {"replay": (True, True), "no kept sets": (False, True), "no experts": (True, False), "neither": (False, False)}


def write_tiny_moe(folder: Path, seed: int) -> None:
    """Write a random Qwen3-MoE of 4 layers, each with 64 experts of which a token gets 8, with a tokenizer."""
    write_tiny_model(folder, seed)  # for its tokenizer and chat template
    known = json.loads((folder / "config.json").read_text())
    shared = ("vocab_size", "hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "eos_token_id")
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **{name: known[name] for name in shared},
        num_hidden_layers=4,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        initializer_range=0.15,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


async def episode(client: AsyncClient, room: asyncio.Semaphore, step: str, first: str) -> float:
    """One session: the agent plays two turns, and what it is worth is set."""
    async with room, client.session(step, group_id=f"{step}-{first}", group_size=GROUP_SIZE) as session:
        reward = await ask({"first": first, "sampling": SAMPLING}, session.base_url, session.api_key)
        await session.set_reward(reward)
        await session.end(outcome="Finished")
    return reward


async def play(client: AsyncClient, step: str) -> float:
    """A group of episodes for each kind of letter; return their mean reward."""
    room = asyncio.Semaphore(AT_ONCE)
    rewards = await asyncio.gather(*[episode(client, room, step, kind) for kind in KINDS for _ in range(GROUP_SIZE)])
    return sum(rewards) / len(rewards)


@dataclass(frozen=True)
class Batch:
    """The samples of an export. B: samples, L: tokens of the longest, T: trained tokens of all samples.

    `trained`: which tokens are trained, [B, L - 1], without the first of each sample. `sampled`: their ids, [T].
    `behaviour`: their logprobs after truncation, as the sampler had them, [T]. `kept`: the ids that truncation left,
    bool [T, vocabulary]. `experts`: [B x L, layers, k]; tokens whose entries are all `missing` have no row. `gain`:
    advantage x weight of the token's sample, [T].
    """

    ids: torch.Tensor
    attention: torch.Tensor
    trained: torch.Tensor
    sampled: torch.Tensor
    behaviour: torch.Tensor
    kept: torch.Tensor
    experts: torch.Tensor
    missing: int
    gain: torch.Tensor


def batch_of(export: Export, vocabulary: int) -> Batch:
    """The tensors of an export. Raises ValueError if a trained token has no kept set."""
    batch, samples = export.to_torch(), export.samples
    ids, trained = batch["input_ids"].long(), batch["loss_mask"][:, 1:] == 1
    gains = torch.tensor([(sample.advantage or 0.0) * sample.weight for sample in samples])
    behaviour = np.concatenate([sample.extra["kept_logprobs"][sample.loss_mask == 1] for sample in samples])
    if np.isnan(behaviour).any():
        raise ValueError("a trained token has no kept set: it was larger than max_kept, or not recorded")
    rows = [torch.from_numpy(sample.extra["routed_experts"].astype(np.int64)) for sample in samples]
    missing = int(np.iinfo(samples[0].extra["routed_experts"].dtype).max)
    return Batch(
        ids=ids,
        attention=batch["attention_mask"],
        trained=trained,
        sampled=ids[:, 1:][trained],
        behaviour=torch.from_numpy(behaviour),
        kept=torch.from_numpy(np.concatenate([kept_of(sample, vocabulary) for sample in samples])),
        experts=torch.nn.utils.rnn.pad_sequence(rows, True, missing).flatten(0, 1),
        missing=missing,
        gain=gains.unsqueeze(1).expand_as(trained)[trained],
    )


def kept_of(sample: Sample, vocabulary: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The kept set of each trained token of a sample, bool [tokens, vocabulary]."""
    sets = KeptSets(sample.extra["kept_counts"], sample.extra["kept_ids"])
    trained: np.ndarray[Any, np.dtype[np.bool_]] = sets.mask(vocabulary)[sample.loss_mask == 1]
    return trained


def logprobs_of(model: torch.nn.Module, batch: Batch, *, use_kept: bool, use_experts: bool) -> torch.Tensor:
    """The trainer's logprob of each trained token, [T]: with the kept sets, those after truncation."""
    forced = replayed_experts(model, batch.experts, batch.missing) if use_experts else nullcontext()
    with forced:
        logits = model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, :-1][batch.trained]
    logits = logits / SAMPLING["temperature"]
    if use_kept:
        logits = logits.masked_fill(~batch.kept, -torch.inf)
    return logits.log_softmax(-1).gather(1, batch.sampled.unsqueeze(1)).squeeze(1)


def compared(logprobs: torch.Tensor, behaviour: torch.Tensor) -> tuple[float, float, float]:
    """Of logprobs of the trainer and of the sampler: the mean ratio, the farthest ratio's distance from 1, and the KL
    divergence of the trainer from the sampler, by the estimator k3 (Schulman 2020, "Approximating KL divergence")."""
    apart = (logprobs - behaviour).double()
    ratio = apart.exp()
    return float(ratio.mean()), float((ratio - 1).abs().max()), float((torch.expm1(apart) - apart).mean())


@contextmanager
def coarse_routers(model: torch.nn.Module) -> Iterator[None]:
    """While the block runs, routers choose experts by logits rounded to bfloat16. Weights stay those of float32."""

    def choose(router: torch.nn.Module, _: Any, output: Any) -> Any:
        logits, weights, chosen = output
        again = logits.bfloat16().float().topk(chosen.shape[-1], dim=-1).indices
        found = logits.float().softmax(-1).gather(-1, again)
        return logits, (found / found.sum(-1, keepdim=True)).to(weights.dtype), again

    with ExitStack() as hooks:
        for router in routers_of(model):
            hooks.callback(router.register_forward_hook(choose).remove)
        yield


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The clipped objective (Schulman et al. 2017, arXiv 1707.06347, equation 7) over the distribution sampled from."""
    ratio = (logprobs_of(model, batch, use_kept=True, use_experts=True) - batch.behaviour).exp()
    return -torch.minimum(ratio * batch.gain, ratio.clamp(1 - CLIP, 1 + CLIP) * batch.gain).mean()


def report(model: torch.nn.Module, batch: Batch, step: int, reward: float) -> None:
    """Print the figures of each way to compute the first ratio."""
    print(f"step {step}  mean reward {reward:.2f}  {len(batch.sampled)} tokens", flush=True)
    for name, (use_kept, use_experts) in WAYS.items():
        with torch.no_grad():
            logprobs = logprobs_of(model, batch, use_kept=use_kept, use_experts=use_experts)
        mean, farthest, divergence = compared(logprobs, batch.behaviour)
        print(f"  {name:12}  first ratio {mean:.6f}  farthest 1 +- {farthest:.1e}  KL {divergence:.1e}", flush=True)


async def train(url: str, folder: Path, steps: int) -> None:
    """Train the weights in `folder`, which the server runs; leave the new ones there, which it then runs."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager", local_files_only=True
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    async with AsyncClient(url) as client:
        for step in range(steps):
            task = f"letters-{step}"
            reward = await play(client, task)
            claim = await client.claim(filter={"task_id": task}, limit=1000, wait_s=60, consumer="torch", export=EXPORT)
            assert claim.export is not None
            batch = batch_of(claim.export, model.config.vocab_size)
            with coarse_routers(model):
                report(model, batch, step, reward)
                for _ in range(PASSES):
                    optimizer.zero_grad()
                    loss_of(model, batch).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
            model.save_pretrained(folder)
            await client.update_weights(str(folder), version=step + 1)
            await client.acknowledge(claim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of the model's first weights")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        model = Path(scratch) / "model"
        write_tiny_moe(model, asked.seed)
        with serving(
            port=0,
            model=str(model),
            engine="transformers",
            engine_arg=("device=cpu",),
            replay=("kept", "experts"),
            database_url=f"sqlite:///{scratch}/replay.db",
            log_level="warning",
        ) as url:
            asyncio.run(train(url, model, asked.steps))


if __name__ == "__main__":
    main()
