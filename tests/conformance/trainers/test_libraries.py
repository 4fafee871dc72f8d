"""tensordict, verl and datasets accept what the readers return, and hold the sampled tokens."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.conformance.packages import package
from tokengrove.client import Client, Export, Sample
from tokengrove.client.adapters import huggingface, roll, verl
from tokengrove.roll import DataProto

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def test_a_tensordict_holds_the_padded_batch(export: Export) -> None:
    tensordict, torch = package("tensordict"), package("torch")
    batch = export.to_tensordict(pad_token_id=3)
    assert isinstance(batch, tensordict.TensorDict)
    assert batch.batch_size == torch.Size([len(export.samples)])
    for row, sample in zip(batch, export.samples, strict=True):
        length = len(sample.input_ids)
        assert row["input_ids"][:length].tolist() == sample.input_ids.tolist()
        assert set(row["input_ids"][length:].tolist()) <= {3}
        assert int(row["loss_mask"].sum()) == int(sample.loss_mask.sum())
        assert int(row["attention_mask"].sum()) == length
    [single] = export.samples[0].to_tensordict()
    assert single["input_ids"].tolist() == export.samples[0].input_ids.tolist()


def test_verls_batch_is_a_tensordict_padded_and_jagged_with_the_same_tokens(export: Export) -> None:
    package("tensordict")
    torch = package("torch")
    padded, jagged = verl.padded(export.samples).to_tensordict(), verl.jagged(export.samples)
    assert padded["responses"].dtype == padded["position_ids"].dtype == torch.int64
    assert padded["rm_scores"].dtype == jagged["rm_scores"].dtype == torch.float32
    assert jagged["input_ids"].layout == torch.jagged
    assert jagged["weight"].tolist() == padded["weight"].tolist() == [sample.weight for sample in export.samples]
    assert [float(row[-1]) for row in jagged["loss_mask"]] == [float(each.loss_mask[-1]) for each in export.samples]
    for row, sample in enumerate(export.samples):
        assert jagged["input_ids"][row].tolist() == sample.input_ids.tolist()
        mask = padded["attention_mask"][row].bool()
        assert padded["input_ids"][row][mask].tolist() == sample.input_ids.tolist()
        assert padded["position_ids"][row][mask].tolist() == jagged["position_ids"][row].tolist()
        assert int(jagged["response_mask"][row].sum()) == int(sample.loss_mask.sum())
        assert float(jagged["rm_scores"][row][-1]) == float(padded["rm_scores"][row].sum()) == float(sample.rewards[0])


def test_verls_own_data_proto_takes_the_batch_and_can_be_divided_and_joined(export: Export) -> None:
    protocol: Any = package("verl.protocol")
    proto = verl.padded(export.samples).to_data_proto()
    assert isinstance(proto, protocol.DataProto)
    assert len(proto) == len(export.samples)
    parts = proto.chunk(2)
    joined = protocol.DataProto.concat(parts)
    assert joined.batch["input_ids"].tolist() == proto.batch["input_ids"].tolist()
    assert sorted(set(joined.non_tensor_batch["uid"])) == ["g1", "g2"]
    shown = proto[0]
    assert shown.non_tensor_batch["__num_turns__"] == 4  # as verl's agent loops count: both sides' messages


def test_rolls_fields_make_a_tensordict_of_one_length(export: Export) -> None:
    package("tensordict")
    fields = roll.trajectories(export.samples, sequence_length=4096)
    batch = fields.to_tensordict()
    assert batch["infer_logprobs"].shape == (len(export.samples), 4095)
    shifted = batch["infer_logprobs"][0][batch["response_mask"][0][1:]]
    assert np.allclose(shifted.numpy(), export.samples[0].logprobs[export.samples[0].loss_mask > 0])
    assert {len(column) for column in fields.non_tensor_batch.values()} == {len(export.samples)}


def rolls(export: Export) -> DataProto:
    fields = roll.trajectories(export.samples)
    return DataProto(fields.batch, fields.non_tensor_batch, fields.meta_info)


def test_tensors_in_rolls_shape_are_joined_chosen_and_grouped(export: Export) -> None:
    tensordict = package("tensordict")
    ours = rolls(export)
    made = ours.to_torch()
    assert isinstance(made.batch, tensordict.TensorDict)
    joined = DataProto.concat([made, made])
    assert joined.batch["input_ids"].tolist() == 2 * ours.batch["input_ids"].tolist()
    assert len(joined) == joined.to_tensordict().batch_size[0] == 2 * len(ours)
    assert joined[[len(ours)]].batch["scores"].tolist() == ours.batch["scores"][:1].tolist()
    groups = made.group_by("traj_id")
    assert {name: len(group) for name, group in groups.items()} == {
        name: len(group) for name, group in ours.group_by("traj_id").items()
    }


def test_rolls_own_class_is_made_where_roll_is_installed(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    tensordict = package("tensordict")

    class Theirs:
        def __init__(self, batch: Any, non_tensor_batch: Any, meta_info: Any) -> None:
            self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    module = ModuleType("roll.distributed.scheduler.protocol")
    module.DataProto = Theirs  # type: ignore[attr-defined]
    for name in ("roll", "roll.distributed", "roll.distributed.scheduler"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    theirs = rolls(export).to_roll()
    assert isinstance(theirs, Theirs) and isinstance(theirs.batch, tensordict.TensorDict)
    assert theirs.batch["input_ids"].tolist() == rolls(export).batch["input_ids"].tolist()


def test_a_dataset_has_a_row_a_sample_with_typed_arrays_and_survives_its_file(export: Export, tmp_path: Any) -> None:
    datasets = package("datasets")
    dataset = huggingface.to_dataset(export.samples)
    dataset.to_parquet(tmp_path / "samples.parquet")
    again = datasets.Dataset.from_parquet(str(tmp_path / "samples.parquet"), cache_dir=str(tmp_path))
    assert again.features == dataset.features
    assert again.features["input_ids"].feature.dtype == "int32"
    assert again.features["logprobs"].feature.dtype == "float32"
    for row, sample in zip(again, export.samples, strict=True):
        assert row["input_ids"] == sample.input_ids.tolist()
        assert row["session_id"] == sample.session_id
        assert json.loads(row["turns"])[-1]["span"] == list(sample.turns[-1]["span"])
    columns = again.with_format("numpy")[0]
    assert columns["logprobs"].dtype == np.float32


def test_a_dataset_drops_nothing_of_a_sample(url: str, export: Export) -> None:
    package("datasets")
    named = [sample.session_id for sample in export.samples]
    with Client(url) as client:
        compared = client.export(session_ids=named, advantages="grpo", step_advantages="grpo", include=["text"])
        tree = client.export(session_ids=named, layout="tree")
    for told in (compared, tree):
        dataset = huggingface.to_dataset(told.samples, sessions=told.sessions)
        unseen = {"images", "image_table"}  # the samples have none
        own = {each.name for each in fields(Sample)} - {"extra", "rewards", "raw_rewards"} - unseen
        shown = {"weight": "weight", "advantages": "advantage"}
        extra = {shown.get(name, name) for sample in told.samples for name in sample.extra}
        assert own | extra | {"reward", "raw_reward", "returns", "session"} <= set(dataset.column_names)
        for row, sample in zip(dataset, told.samples, strict=True):
            assert (row["reward"], row["advantage"]) == (sample.reward, sample.advantage)
            assert row["weight"] == pytest.approx(sample.weight)
            assert sum(row["loss_mask"]) == int(sample.loss_mask.sum()) > 0
            assert row["returns"] == sample.returns.tolist()
            assert json.loads(row["session"]) == told.sessions[sample.session_id]
            for name, value in sample.extra.items():
                if isinstance(value, np.ndarray) and name not in shown:
                    assert row[name] == value.tolist(), name
    assert huggingface.to_dataset(tree.samples).features["node_returns"].feature.dtype == "float32"
    assert "text" in huggingface.to_dataset(compared.samples).column_names


def test_verls_data_proto_holds_advantages_weights_timings_and_versions(url: str, export: Export) -> None:
    package("verl.protocol")
    with Client(url) as client:
        told = client.export(session_ids=[sample.session_id for sample in export.samples], advantages="grpo")
    proto = verl.padded(told.samples, sessions=told.sessions).to_data_proto()
    batch = proto.batch
    assert batch["response_mask"].sum().item() == sum(int(sample.loss_mask.sum()) for sample in told.samples)
    for row, sample in enumerate(told.samples):
        mask = batch["response_mask"][row].bool()
        assert set(batch["advantages"][row][mask].tolist()) == {np.float32(sample.advantage)}
        assert not batch["advantages"][row][~mask].any()
        assert batch["rollout_log_probs"][row][mask].tolist() == sample.logprobs[sample.loss_mask > 0].tolist()
        assert batch["weight"][row].item() == 1.0
    assert all(each["generate_sequences"] > 0 for each in proto.meta_info["metrics"])
    assert proto.meta_info["timing"]["agent_loop/generate_sequences/max"] > 0
    assert proto[0].non_tensor_batch["min_global_steps"] == proto[0].non_tensor_batch["max_global_steps"] == 0
    joined = package("verl.protocol").DataProto.concat(proto.chunk(2))
    assert joined.batch["returns"].tolist() == batch["returns"].tolist()
