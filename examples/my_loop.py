"""Your agent and your GRPO loop: `python examples/my_loop.py [MODULE:FUNCTION of the agent] [trackio or wandb]`."""

import asyncio
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
from grpo_step import grpo_loss
from letters_agent import QUESTIONS, is_right
from transformers import AutoModelForCausalLM

from tokengrove import AsyncClient
from tokengrove.testing import serving, write_tiny_model


async def rollout(client, agent, task, kind):
    async with client.session(task, group_id=f"{task}-{kind}") as session:
        answer = await agent(session.base_url, session.api_key, QUESTIONS[kind])
        await session.set_reward(float(is_right(answer, kind)))


async def train(url, folder, agent, tracker):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    async with AsyncClient(url) as client:
        for step in range(20):
            task, how = f"letters-{step}", {"layout": "concat", "advantages": "grpo"}
            rollouts = (rollout(client, agent, task, kind) for kind in [*QUESTIONS] * 16)
            if failed := [*filter(None, await asyncio.gather(*rollouts, return_exceptions=True))]:
                print(f"{len(failed)} rollouts failed, the first with {failed[0]!r}")
            claim = await client.claim(filter={"task_id": task}, limit=1000, consumer="mine", export=how)
            for _ in range(3):
                optimizer.zero_grad()
                loss, _ = grpo_loss(model, claim.export)
                loss.backward()
                optimizer.step()
            model.save_pretrained(folder)
            await client.update_weights(folder, version=step + 1)
            await client.acknowledge(claim)
            told = {"reward": sum(sample.score for sample in claim.export.samples) / len(claim.export.samples)}
            print(f"step {step:2}  mean reward {told['reward']:.2f}", flush=True)
            if tracker:
                tracker.log(told)


def main(agent="my_agents:plain", tracker=None):
    module, name = agent.split(":")
    if tracker := tracker and import_module(tracker):
        tracker.init(project="my-loop")
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        with serving(port=0, model=folder, database_url=f"sqlite:///{folder}/my.db", log_level="warning") as url:
            asyncio.run(train(url, folder, getattr(import_module(module), name), tracker))


if __name__ == "__main__":
    main(*sys.argv[1:])
