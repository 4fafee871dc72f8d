"""TRL's own dataset drains the buffer of our worker, and finds the sampled tokens in it, group by group."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conformance.packages import package
from tests.conformance.trainers.played import GROUPS, TRIES, ask, play
from tokengrove.client import Client, Export, Session
from tokengrove.client.adapters.trl import ClaimingWorker, rollout_samples
from tokengrove.client.adapters.trl_rollout import RolloutFunction, session_reward

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def trainer_module() -> Any:
    package("trl")
    return package("trl.experimental.async_grpo.async_grpo_trainer")


@pytest.fixture
def worker(url: str) -> Iterator[ClaimingWorker]:
    worker = ClaimingWorker(url, group_size=TRIES, lease_s=60.0)
    yield worker
    worker.stop()


def test_rollout_samples_are_trls_class_with_group_relative_advantages(export: Export) -> None:
    trainer = trainer_module()
    rows = rollout_samples(export.samples)
    assert len(rows) == len(export.samples) == len(GROUPS) * TRIES
    by_group: dict[int, list[Any]] = defaultdict(list)
    for row, sample in zip(rows, sorted(export.samples, key=lambda s: str(s.group_id)), strict=True):
        assert isinstance(row, trainer.RolloutSample)
        assert (row.input_ids.dtype, row.old_log_probs.dtype) == (np.dtype(np.int64), np.dtype(np.float32))
        assert len(row.input_ids) == len(row.completion_mask) == len(row.old_log_probs)
        assert row.input_ids.tolist() == sample.input_ids.tolist()
        assert not row.old_log_probs[row.completion_mask == 0].any()
        assert int(row.completion_mask.sum()) == int(sample.loss_mask.sum()) > 0
        by_group[row.group_id].append(row)
    expected = (np.arange(TRIES) - np.mean(range(TRIES))) / (np.std(range(TRIES)) + 1e-8)
    for members in by_group.values():
        assert sorted(row.advantage for row in members) == pytest.approx(expected)


def test_a_row_has_the_conversation_if_the_export_includes_it(url: str, export: Export) -> None:
    trainer_module()
    assert rollout_samples(export.samples)[0].prompt == []
    with Client(url) as client:
        told = client.export(session_ids=[sample.session_id for sample in export.samples], include=["messages"])
    for row in rollout_samples(told.samples):
        assert [message["role"] for message in row.prompt] == ["user", "assistant", "user"]
        assert [message["role"] for message in row.completion] == ["assistant"]


def test_the_worker_has_every_member_of_trls_protocol(worker: ClaimingWorker) -> None:
    protocol = trainer_module().RolloutWorkerProtocol
    named = {*protocol.__annotations__, *(name for name in vars(protocol) if not name.startswith("_"))}
    assert {"rollout_buffer", "metrics_queue", "start", "stop", "update_model_version", "check_health"} <= named
    assert all(hasattr(worker, name) for name in named)


def test_trls_dataset_receives_whole_groups_which_are_then_acknowledged(
    url: str, export: Export, worker: ClaimingWorker
) -> None:
    trainer = trainer_module()
    worker.start()
    dataset = trainer.RolloutQueueDataset(
        rollout_queue=worker.rollout_buffer,
        model_version_fn=lambda: 0,
        check_health_fn=worker.check_health,
        stale_after_s=60.0,
        metrics=defaultdict(list),
        poll_interval_s=0.2,
    )
    rows = iter(dataset)
    fed = [next(rows) for _ in export.samples]
    assert sorted(tuple(row["input_ids"].tolist()) for row in fed) == sorted(
        tuple(sample.input_ids.tolist()) for sample in export.samples
    )
    groups: dict[int, float] = defaultdict(float)
    for row in fed:
        groups[row["group_id"]] += row["advantage"]
    assert sorted(groups) == list(range(len(GROUPS)))
    assert list(groups.values()) == pytest.approx([0.0] * len(GROUPS), abs=1e-6)
    for _ in GROUPS:
        assert set(worker.metrics_queue.get(timeout=60)) == {"rollout/version_lag"}
    worker.stop()
    with Client(url) as client:
        assert client.claim(limit=1000).sessions == {}


def test_an_incomplete_group_stays_in_the_queue(url: str, export: Export) -> None:
    trainer_module()
    with Client(url) as client:
        started = play(url, "half", 0)
        worker = ClaimingWorker(url, group_size=2, consumer="dies", filter={"group_id": "half"})
        worker.start()
        assert [*client.claim(limit=2, filter={"group_id": "half"}).sessions] == [started]
        worker.stop()
        assert not worker._thread.is_alive()
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get_nowait()


def test_a_worker_that_cannot_claim_reports_it_to_the_trainer() -> None:
    trainer_module()
    worker = ClaimingWorker("http://127.0.0.1:9", group_size=2)
    worker.start()
    worker._thread.join(60)
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:9"):
        worker.check_health(60.0)
    worker.stop()


def test_trls_trainer_generates_with_our_rollout_function(url: str) -> None:
    package("trl")
    grpo: Any = package("trl.trainer.grpo_trainer")
    torch: Any = package("torch")

    def agent(prompt: str, session: Session) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        messages.append(ask(session.base_url, messages))
        ask(session.base_url, [*messages, {"role": "user", "content": "again"}])
        session.set_reward(float(len(prompt)))

    trainer = object.__new__(grpo.GRPOTrainer)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda values: values)
    trainer.model, trainer.use_vllm, trainer.tools = SimpleNamespace(training=True), False, None
    trainer.state = SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    trainer._metrics = {"train": defaultdict(list)}
    trainer._tokenizer, trainer.eos_token_ids = SimpleNamespace(eos_token_id=1, pad_token_id=0), [1]
    trainer.processing_class = SimpleNamespace(batch_decode=lambda ids, **_: ["decoded" for _ in ids])
    trainer.rollout_func = RolloutFunction(agent, url, at_once=4)
    prompts = ["say", "say", "sing", "sing"]
    prompt_ids, completion_ids, tool_mask, _, logprobs, extra, *_ = trainer._generate(prompts)
    with Client(url) as client:
        samples = {s.session_id: s for s in client.export(session_ids=extra["session_id"]).samples}
    assert len({samples[name].group_id for name in extra["session_id"]}) == 2
    for row, name in enumerate(extra["session_id"]):
        sample = samples[name]
        assert prompt_ids[row] + completion_ids[row] == sample.input_ids.tolist()
        assert sum(tool_mask[row]) == int(sample.loss_mask.sum()) < len(completion_ids[row])
        trained = [value for value, on in zip(logprobs[row], tool_mask[row], strict=True) if on]
        assert trained == sample.logprobs[sample.loss_mask > 0].tolist()
    assert session_reward(prompts=prompts, **extra) == [3.0, 3.0, 4.0, 4.0]
