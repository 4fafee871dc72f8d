"""What the transformers engine refuses of LoRA adapters, and why, with the way out."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.interface import AdapterSource
from proxy.engine.transformers.adapter_files import AdapterFiles, read_files, read_pairs
from proxy.engine.transformers.adapters import target_linears
from tokengrove.errors import InvalidRequest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
Q_PROJ = "base_model.model.layers.0.q_proj"


class Layer(torch.nn.Module):
    """A layer with two linear layers of its own, one of an expert, and a module of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(4, 6, bias=False)
        self.o_proj = torch.nn.Linear(6, 4)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
        self.norm = torch.nn.LayerNorm(4)


class Model(torch.nn.Module):
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer()])
        self.lm_head = torch.nn.Linear(4, 9)


@pytest.fixture(scope="module")
def model() -> Any:
    return Model()


def tensors(name: str = Q_PROJ, a: Any = (2, 4), b: Any = (6, 2)) -> dict[str, Any]:
    return {f"{name}.lora_A.weight": torch.ones(a), f"{name}.lora_B.weight": torch.ones(b)}


def pairs(model: Any, found: dict[str, Any] | None = None, **config: Any) -> Any:
    from safetensors.torch import save

    files = AdapterFiles({**CONFIG, **config}, save(tensors() if found is None else found))
    return read_pairs(files, model, target_linears(model))


def test_an_adapter_is_read_by_the_names_of_the_models_modules(model) -> None:
    [(name, pair)] = pairs(model).items()
    assert name == "layers.0.q_proj" and pair.scaling == 1.5
    assert pair.a.shape == (2, 4) and pair.b.shape == (6, 2) and pair.a.dtype == torch.float32


def test_an_adapter_in_half_precision_is_applied_in_float32(model) -> None:
    [pair] = pairs(model, {name: tensor.bfloat16() for name, tensor in tensors().items()}).values()
    assert pair.a.dtype == pair.b.dtype == torch.float32


def test_all_linear_is_every_linear_layer_that_is_not_excluded(model) -> None:
    assert pairs(model, target_modules="all-linear", exclude_modules=["o_proj"]).keys() == {"layers.0.q_proj"}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "peft_type 'PROMPT_TUNING' is not supported; train .* peft_type LORA"),
        ({"peft_type": None}, "peft_type None is not supported"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not supported; train .* task_type CAUSAL_LM"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported; train .* without it"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"lora_bias": True}, "lora_bias True"),
        ({"use_dora": True}, "use_dora True"),
        ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters .* train .* linear layers of the decoder"),
        ({"use_later_invention": 1}, "use_later_invention 1 is not supported"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the weights of the base model; save .*_conversion"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": ["q_proj", "lm_head"]}, "targets lm_head, for which .* has no tensors"),
        ({"target_modules": ["k_proj"]}, "tensors of layers.0.q_proj, which .* does not target"),
        ({"target_modules": "all-linear"}, "targets layers.0.o_proj, for which .* has no tensors"),
        ({"exclude_modules": ["q_proj"]}, "tensors of layers.0.q_proj, which .* does not target"),
        ({"layers_to_transform": [1]}, "tensors of layers.0.q_proj, which .* does not target"),
        ({"r": 0}, "the rank 0"),
        ({"layers_pattern": "layers"}, "adapter_config.json is invalid"),
    ],
)
def test_an_adapter_that_cannot_be_honoured_is_refused_by_name(model, config: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the adapter cannot be loaded: .*{why}") as refused:
        pairs(model, **config)
    assert refused.value.param == "path"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({}, "has no tensors; save"),
        (tensors("base_model.model.layers.1.q_proj"), "no module layers.1.q_proj: .* another base model"),
        (tensors("base_model.model.layers.0.norm"), r"layers.0.norm \(LayerNorm\) cannot have an adapter; train"),
        (tensors("base_model.model.lm_head"), r"lm_head \(Linear\) cannot have an adapter"),
        (tensors("base_model.model.layers.0.experts.0"), r"layers.0.experts.0 \(Linear\) cannot have an adapter"),
        (tensors(a=(2, 5)), r"lora_A of layers.0.q_proj has the shape \[2, 5\], but .* make it \[2, 4\]; .* base"),
        (tensors(b=(7, 2)), r"lora_B of layers.0.q_proj has the shape \[7, 2\], but .* make it \[6, 2\]"),
        (tensors(a=(3, 4), b=(6, 3)), r"the rank 2 make it \[2, 4\]"),
        ({f"{Q_PROJ}.lora_A.weight": torch.ones(2, 4)}, "layers.0.q_proj has no lora_B; the file is incomplete"),
        ({name: tensor.int() for name, tensor in tensors().items()}, "lora_A of .* has the dtype torch.int32"),
        ({**tensors(), f"{Q_PROJ}.lora_magnitude_vector": torch.ones(6)}, "lora_magnitude_vector' is not of a LoRA"),
        ({**tensors(), "base_model.model.lm_head.weight": torch.ones(9, 4)}, "lm_head.weight' is not of a LoRA pair"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(model, found: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        pairs(model, found)


def written(folder: Path, **files: bytes) -> AdapterSource:
    for name, content in files.items():
        (folder / f"adapter_{name}".replace("_json", ".json").replace("_safetensors", ".safetensors")).write_bytes(
            content
        )
    return AdapterSource(str(folder))


class Harmful:
    """Writes a file when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self._trap = trap

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._trap,)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    source = written(tmp_path, config_json=json.dumps(CONFIG).encode())
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "trap")))
    with pytest.raises(InvalidRequest, match=r"no adapter_model.safetensors: adapter_model.bin is a pickle, which .*"):
        read_files(source)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, "has no adapter_config.json; an adapter is a folder with .* as PEFT's save_pretrained writes it"),
        ({"config_json": b"{}"}, "has no adapter_model.safetensors; an adapter is a folder"),
        ({"config_json": b"{", "model_safetensors": b""}, "cannot be read"),
        ({"config_json": b"[]", "model_safetensors": b""}, "adapter_config.json must hold a JSON object"),
    ],
)
def test_missing_and_broken_files_are_refused(tmp_path: Path, files: dict[str, bytes], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_files(written(tmp_path, **files))


def test_broken_tensors_are_refused(model) -> None:
    with pytest.raises(InvalidRequest, match=r"adapter_model\.safetensors cannot be read"):
        read_pairs(AdapterFiles(CONFIG, b"\0" * 100), model, target_linears(model))


def test_files_that_were_sent_are_not_read_from_the_folder(tmp_path: Path) -> None:
    assert read_files(AdapterSource("/nowhere", CONFIG, b"x")) == AdapterFiles(CONFIG, b"x")
    one, same, other = (AdapterFiles({**CONFIG, "r": r}, b"x") for r in (2, 2, 3))
    assert one.digest == same.digest != other.digest != AdapterFiles(CONFIG, b"y").digest
