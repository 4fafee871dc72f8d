"""Trains a small model, made on the spot, with TRL's asynchronous GRPO on the episodes of an unmodified agent.

The agent is examples/letters_agent.py. TRL's own trainer makes the steps: its worker plays groups of episodes on the
server while it trains, and after each step the server gets the new weights. It ends when the mean reward, about 0.25
with random weights, has stayed above 0.9: on two cores after one to two minutes. It needs the package trl. Run it from
a checkout:

    python examples/train_trl.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from datasets import Dataset
from letters_agent import QUESTIONS, ask
from transformers import PrinterCallback, TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from tokengrove.rollout.episodes import Server
from tokengrove.trl import AgentWorker, WeightTransfer, train_without_gpu

GROUP_SIZE, AT_ONCE, MOST_STEPS = 16, 16, 120
ENOUGH, IN_A_ROW = 0.9, 5


class Curve(TrainerCallback):
    """Prints the mean reward of each step, and ends the training when it has been high for some steps."""

    def __init__(self) -> None:
        self.rewards: list[float] = []

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if logs and "loss" in logs:
            self.rewards.append(logs["reward"])
            lag = logs["sample/staleness_mean"]
            print(f"step {state.global_step:2}  mean reward {logs['reward']:.2f}  version lag {lag:.1f}", flush=True)
        latest = self.rewards[-IN_A_ROW:]
        control.should_training_stop = len(latest) == IN_A_ROW and min(latest) > ENOUGH


def config(folder: Path, steps: int) -> AsyncGRPOConfig:
    """One step takes the rows of two groups, one of each task."""
    return AsyncGRPOConfig(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2 * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        token_budget=0,  # rows are counted; a budget of tokens would be asked of a vLLM server
        learning_rate=4e-3,
        warmup_steps=5,
        adam_beta2=0.95,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def train(server: Server, model: Path, steps: int) -> None:
    """Train the weights in `model`, which the server runs; it has the new ones at the end."""
    train_without_gpu()
    rows = Dataset.from_list([{"prompt": QUESTIONS[first], "first": first} for first in QUESTIONS])
    worker = AgentWorker(
        server.url,
        server.admin_key,
        agent=ask,
        dataset=rows,
        group_size=GROUP_SIZE,
        at_once=AT_ONCE,
        buffer_size=2 * GROUP_SIZE,
    )
    with tempfile.TemporaryDirectory(prefix="letters-trl-") as folder:
        trainer = AsyncGRPOTrainer(
            str(model),
            args=config(Path(folder), steps),
            train_dataset=rows,
            callbacks=[Curve()],
            rollout_worker=worker,
            weight_transfer=WeightTransfer(server.url, server.admin_key, model=model),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


@contextmanager
def served(seed: int) -> Iterator[tuple[Server, Path]]:
    """A server of a model with random weights, in a process of its own, and the model's folder."""
    from tokengrove.rollout.own_server import own_server
    from tokengrove.testing import write_tiny_model

    with tempfile.TemporaryDirectory(prefix="letters-") as scratch:
        model = Path(scratch) / "model"
        write_tiny_model(model, seed)
        settings = {"model": str(model), "engine": "transformers", "engine_arg": ["device=cpu"]}
        with own_server(settings, Path(scratch) / "server") as server:
            yield server, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=MOST_STEPS, help="at most")
    parser.add_argument("--seed", type=int, default=0, help="of the model's first weights")
    parser.add_argument("--url", help="a server that runs already, with the weights in --model")
    parser.add_argument("--model", type=Path, help="the folder of these weights")
    asked = parser.parse_args()
    if (asked.url is None) != (asked.model is None):
        parser.error("--url and --model belong together")
    torch.set_num_threads(1)  # the model is so small that more are slower
    if asked.url is not None:
        train(Server(asked.url), asked.model, asked.steps)
        return
    with served(asked.seed) as (server, model):
        train(server, model, asked.steps)


if __name__ == "__main__":
    main()
