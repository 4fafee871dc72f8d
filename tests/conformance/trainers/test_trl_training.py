"""TRL's own asynchronous GRPO takes optimizer steps, on a CPU, on rollouts from here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.tiny.model import build_tiny_model
from tests.conformance.packages import package
from tests.conformance.trainers import trl_agents
from tests.e2e.processes import server_process
from tokengrove.client import Client

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

PROMPTS = ["Say something.", "Name a tree."]
GROUP, STEPS = 4, 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_tiny_model(tmp_path / "model", seed=0)
    return tmp_path / "model"


@pytest.fixture(params=["transformers", "scripted"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(engine: str, model: Path, tmp_path: Path) -> Iterator[str]:
    device = ["--engine-arg", "device=cpu"] if engine == "transformers" else []
    with server_process(tmp_path, "--model", str(model), "--engine", engine, *device) as process:
        yield process.url.rstrip("/")


@pytest.fixture
def rows() -> Any:
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return package("datasets").Dataset.from_dict({"prompt": messages})


@pytest.fixture
def make_trainer(model: Path, rows: Any, tmp_path: Path) -> Callable[..., Any]:
    """A real trainer of the model in `model`; it is given the worker and the transfer."""
    package("trl")
    package("trl.experimental.async_grpo")
    from tokengrove.trl import train_without_gpu

    train_without_gpu()
    grpo: Any = package("trl.experimental.async_grpo")
    config = grpo.AsyncGRPOConfig(
        str(tmp_path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=GROUP,
        token_budget=0,
        num_generations=GROUP,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        heartbeat_stale_after_s=120.0,
    )
    return partial(grpo.AsyncGRPOTrainer, str(model), args=config, train_dataset=rows)


def steps(trainer: Any) -> list[dict[str, float]]:
    """What the trainer logged of each step."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def logprobs(model: Any, prompt: list[int], output: list[int]) -> list[float]:
    """What a model thinks of an output, at temperature 1."""
    torch: Any = package("torch")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(logits.log_softmax(-1), output, strict=True)]


def test_trls_trainer_takes_steps_on_our_worker_and_the_server_has_its_weights(
    engine: str, url: str, model: Path, rows: Any, make_trainer: Callable[..., Any]
) -> None:
    from tokengrove.trl import AgentWorker, WeightTransfer

    worker = AgentWorker(url, agent=trl_agents.talk, dataset=rows, group_size=GROUP, at_once=8, buffer_size=GROUP)
    trainer = make_trainer(rollout_worker=worker, weight_transfer=WeightTransfer(url, model=model))
    trainer.train()

    assert [entry["step"] for entry in steps(trainer)] == list(range(1, STEPS + 1))
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in steps(trainer))
    assert all(entry["rollout/turns_mean"] == 2.0 for entry in steps(trainer) if "rollout/turns_mean" in entry)
    with Client(url) as client:
        state = client.engine()
        assert state.paused is None
        assert state.version == trainer.model_version == worker.model_version == STEPS + 1
        statuses = {session["status"] for session in client.sessions()}
        assert statuses == {"ended"}
        if engine == "transformers":
            assert steps(trainer)[0]["ratio"] == pytest.approx(1.0, abs=1e-3)
            check_weights(client, model, trainer)


def check_weights(client: Client, model: Path, trainer: Any) -> None:
    """The server samples greedily what the trainer's weights say, and no longer what the first weights said."""
    transformers: Any = package("transformers")
    prompt = client.tokenize([{"role": "user", "content": PROMPTS[0]}])
    said = client.generate(prompt, sampling_params={"temperature": 0.0, "max_tokens": 8})
    first = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    trained = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    trained.load_state_dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())
    assert said.logprobs == pytest.approx(logprobs(trained, prompt, said.output_ids), abs=1e-4)
    assert said.logprobs != pytest.approx(logprobs(first, prompt, said.output_ids), abs=1e-2)
    assert set(said.versions) == {STEPS + 1}


@pytest.fixture
def harness_worker(rows: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """TRL's own worker for agents that own their loop. It asks for vLLM when it is made, and needs none after that."""
    package("trl")
    package("openenv")
    worker_module: Any = package("trl.experimental.async_grpo.async_rollout_worker")
    harness: Any = package("trl.experimental.async_grpo.openenv_harness")
    monkeypatch.setattr(worker_module, "is_vllm_available", lambda: True)
    tokenizer = package("transformers").AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = {}  # TRL looks for one that it knows, to parse answers that it samples itself
    made: list[Any] = []

    def make(factory: Callable[..., Any], **more: Any) -> Any:
        made.append(
            harness.HarnessRolloutWorker(
                harness_session_factory=factory,
                model_name="any",
                dataset=rows,
                reward_funcs=[],
                processing_class=tokenizer,
                eos_token_ids=[tokenizer.eos_token_id],
                num_generations=GROUP,
                max_inflight_tasks=GROUP,
                queue_maxsize=GROUP,
                **more,
            )
        )
        return made[-1]

    yield make
    for worker in made:
        worker.stop()


@pytest.mark.parametrize("engine", ["transformers"], indirect=True)
def test_trls_own_worker_plays_agents_in_our_sessions_with_trls_sampling(
    url: str, model: Path, make_trainer: Callable[..., Any], harness_worker: Callable[..., Any]
) -> None:
    from tokengrove.trl import SessionFactory, WeightTransfer

    worker = harness_worker(
        partial(SessionFactory, url, agent=trl_agents.ask, reward=trl_agents.answer_length), temperature=0.7
    )
    trainer = make_trainer(rollout_worker=worker, weight_transfer=WeightTransfer(url, model=model))
    trainer.train()
    assert [entry["step"] for entry in steps(trainer)] == list(range(1, STEPS + 1))
    assert all(math.isfinite(entry["loss"]) for entry in steps(trainer))
    assert all(entry["rewards/harness_reward"] > 0 for entry in steps(trainer))
    with Client(url) as client:
        sessions = client.sessions()
        assert {session["status"] for session in sessions} == {"ended"}
        assert {session["outcome"] for session in sessions} <= {"Finished", "Failed"}
        shown = client.show_turn(sessions[0]["session_id"], 0, ["messages"])
        assert shown["sampling"]["temperature"] == 0.7 != trl_agents.HOT
        assert "top_p" not in shown["sampling"]
        assert client.engine().version == STEPS + 1
