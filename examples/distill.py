"""Distils a teacher into a student on the student's own answers, with the teacher's scores from the export.

The student answers prompts through the server; the frozen teacher, another model of the table, scores the sampled
tokens (`teachers` of the export). Each step lowers the reverse KL of the student to the teacher. Both are small models
with random weights, so the answers say nothing, but the KL does: it falls from about 1.3 to 0.6 nats a token. Run it
from a checkout:

    python examples/distill.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from tokengrove import AsyncClient, Export
from tokengrove.client.options import SampleOptions
from tokengrove.testing import serving, write_tiny_model

PROMPTS, OF_EACH, AT_ONCE, MAX_TOKENS, PASSES = 16, 4, 16, 32, 2
LEARNING_RATE, CLIP = 7e-3, 0.2
EXPORT: SampleOptions = {"layout": "concat", "teachers": [{"name": "teacher", "model": "teacher"}]}


async def answer(client: AsyncClient, room: asyncio.Semaphore, task_id: str, prompt: str) -> None:
    """One session with one answer of the student."""
    async with room, client.session(task_id) as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as openai:
            await openai.chat.completions.create(
                model="student", messages=[{"role": "user", "content": prompt}], max_tokens=MAX_TOKENS
            )
        await session.end(outcome="Finished")


def scores_of(export: Export) -> torch.Tensor:
    """The teacher's logprobs of the trained tokens, in the order of the samples."""
    found = [torch.from_numpy(each.extra["teacher_logprobs"][each.loss_mask > 0]) for each in export.samples]
    return torch.cat(found)


def loss_of(model: torch.nn.Module, export: Export) -> torch.Tensor:
    """The clipped objective in which the advantage of a sampled token is log p_teacher - log p_student.

    Its mean over the student's samples is the negative of the reverse KL: on-policy distillation, as in Lu et al. 2025,
    "On-Policy Distillation" (Thinking Machines Lab), and, for whole sequences, Gu et al. 2024, "MiniLLM" (arXiv
    2306.08543), equation 1. The logprobs of the student are those of its sampling, from the export.
    """
    batch = export.to_torch()
    ids, trained = batch["input_ids"].long(), batch["loss_mask"][:, 1:] == 1
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1][trained]
    now = logits.log_softmax(-1).gather(1, ids[:, 1:][trained].unsqueeze(1)).squeeze(1)
    before = batch["logprobs"][:, 1:][trained]
    gain, ratio = scores_of(export) - before, (now - before).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()


def reverse_kl(export: Export) -> float:
    """The mean of log p_student - log p_teacher over the sampled tokens, in nats a token."""
    own = torch.cat([torch.from_numpy(each.logprobs[each.loss_mask > 0]) for each in export.samples])
    return float((own - scores_of(export)).mean())


async def distill(url: str, folder: Path, steps: int) -> None:
    """Train the weights in `folder`, which the server runs as the student; leave the new ones there."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    async with AsyncClient(url) as client:
        for step in range(steps):
            room = asyncio.Semaphore(AT_ONCE)
            prompts = [f"Tell me about the number {number}." for number in range(PROMPTS)] * OF_EACH
            await asyncio.gather(*[answer(client, room, f"distill-{step}", prompt) for prompt in prompts])
            claim = await client.claim(filter={"task_id": f"distill-{step}"}, limit=1000, wait_s=60, export=EXPORT)
            assert claim.export is not None
            for _ in range(PASSES):
                optimizer.zero_grad()
                loss_of(model, claim.export).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            model.save_pretrained(folder)
            await client.update_weights(str(folder), version=step + 1)
            await client.acknowledge(claim)
            print(f"step {step:2}  reverse KL {reverse_kl(claim.export):.3f} nats a token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first weights of the student")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    with tempfile.TemporaryDirectory(prefix="distill-") as scratch:
        student, teacher = Path(scratch) / "student", Path(scratch) / "teacher"
        write_tiny_model(student, asked.seed)
        write_tiny_model(teacher, asked.seed + 1)
        tables = {"student": {}, "teacher": {"kind": "frozen", "engine": "transformers", "model": str(teacher)}}
        with serving(
            port=0,
            model=str(student),
            engine="transformers",
            engine_arg=("device=cpu",),
            models=json.dumps(tables),
            database_url=f"sqlite:///{scratch}/distill.db",
            log_level="warning",
        ) as url:
            asyncio.run(distill(url, student, asked.steps))


if __name__ == "__main__":
    main()
