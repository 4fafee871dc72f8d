"""Reads LoRA adapters in PEFT's layout and checks that they fit the model. What cannot be honoured is refused by name.

Only safetensors are read: the older `adapter_model.bin` is a pickle, which could run any code.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.engine.interface import AdapterSource
from tokengrove.errors import InvalidRequest

if TYPE_CHECKING:
    import torch

_CONFIG, _TENSORS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_OF_PAIR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_HONOURED = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout"),
        *("megatron_core", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("qalora_group_size", "ensure_weight_tying", "fan_in_fan_out"),
    }
)
"""Fields that only training, or how the adapter was initialised, depends on, or that linear layers do not have."""

_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model's weights as they are."""


class LoraPair(NamedTuple):
    """The matrices of one linear layer, in float32: it adds `scaling * b @ a @ x`. `a` [rank, in], `b` [out, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. `digest`: of its files. `pairs`: by the names of the model's modules.

    `prefix_key`: of the prefixes that its requests share, positive and another for each load.
    """

    version: int
    digest: str
    prefix_key: int
    pairs: Mapping[str, LoraPair]


class AdapterFiles(NamedTuple):
    """The contents of an adapter's two files."""

    config: Mapping[str, Any]
    tensors: bytes

    @property
    def digest(self) -> str:
        """Equal for equal contents."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())
        digest.update(self.tensors)
        return digest.hexdigest()


def read_files(source: AdapterSource) -> AdapterFiles:
    """The files of an adapter, from its folder unless they were sent. Raises InvalidRequest naming what is missing."""
    folder = Path(source.path)
    try:
        config = source.config
        if config is None:
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        tensors = (folder / _TENSORS).read_bytes() if source.tensors is None else source.tensors
    except FileNotFoundError as error:
        raise _unfit(f"{folder} has no {Path(error.filename).name}" + _way_to_save(folder)) from None
    except (OSError, ValueError) as error:
        raise _unfit(f"the adapter in {folder} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise _unfit(f"{_CONFIG} must hold a JSON object")
    return AdapterFiles(config, tensors)


def lora_config(config: Mapping[str, Any]) -> Any:
    """The fields of `config` that decide what an adapter computes, as `peft.LoraConfig`.

    Raises InvalidRequest for an adapter of another kind or task, or with a variant that is not supported.
    """
    from peft import LoraConfig

    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA":
        raise _unfit(f"peft_type {kind!r} is not supported; train an adapter with peft_type LORA")
    if task not in (None, "CAUSAL_LM"):
        raise _unfit(f"task_type {task!r} is not supported; train an adapter with task_type CAUSAL_LM")
    started = config.get("init_lora_weights")
    if started not in _PLAIN_STARTS:
        raise _unfit(
            f"init_lora_weights {started!r} changes the weights of the base model; save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    _check_variants(config, vars(LoraConfig()))
    try:
        return LoraConfig(**{name: config[name] for name in _HONOURED if name in config})
    except (TypeError, ValueError) as error:
        raise _unfit(f"{_CONFIG} is invalid: {error}") from error


def read_pairs(files: AdapterFiles, model: Any, linears: Mapping[str, Any]) -> dict[str, LoraPair]:
    """The matrices of an adapter by module, on the device of `model`.

    `linears`: the linear layers that may have an adapter. Raises InvalidRequest unless the adapter fits the model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    config = lora_config(files.config)
    try:
        tensors = load(files.tensors)
    except (SafetensorError, ValueError) as error:
        raise _unfit(f"{_TENSORS} cannot be read: {error}") from error
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found = _OF_PAIR.fullmatch(key)
        if found is None:
            raise _unfit(f"the tensor {key!r} is not of a LoRA pair of a linear layer{_HOW_TO_TARGET}")
        halves.setdefault(found[1], {})[found[2]] = tensor
    for name in halves.keys() - linears.keys():
        raise _unfit(_why_no_target(name, model))
    pairs = {name: _pair(name, half, linears[name], config, model.device) for name, half in halves.items()}
    if config.target_modules == "all-linear":
        config.target_modules = set(linears)
    _check_targets(config, pairs.keys(), model)
    return pairs


_HOW_TO_TARGET = "; train an adapter whose target_modules are linear layers of the decoder only"


def _pair(name: str, half: Mapping[str, Any], linear: Any, config: Any, device: Any) -> LoraPair:
    import torch
    from peft.utils.other import get_pattern_key

    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    shapes = {"A": (rank, linear.in_features), "B": (linear.out_features, rank)}
    for letter, shape in shapes.items():
        if letter not in half:
            raise _unfit(f"{name} has no lora_{letter}; the file is incomplete")
        found = tuple(half[letter].shape)
        if found != shape:
            raise _unfit(
                f"lora_{letter} of {name} has the shape {list(found)}, but the model and the rank {rank} make it "
                f"{list(shape)}; the adapter is of another base model, or its {_CONFIG} is of another adapter"
            )
        if not half[letter].is_floating_point():
            raise _unfit(f"lora_{letter} of {name} has the dtype {half[letter].dtype}; save it as a float")
    a, b = (half[letter].to(device, torch.float32) for letter in "AB")
    return LoraPair(a, b, alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _check_variants(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a field that changes what an adapter computes, and is neither honoured nor unset."""
    if parameters := config.get("target_parameters"):
        raise _unfit(f"target_parameters {parameters} is not supported, as experts have them{_HOW_TO_TARGET}")
    ignored = {*_HONOURED, *_WITHOUT_EFFECT, "peft_type", "task_type", "init_lora_weights"}
    for name in sorted(config.keys() - ignored):
        if config[name] and config[name] != defaults.get(name):
            raise _unfit(f"{name} {config[name]!r} is not supported; train the adapter without it")


def _check_targets(config: Any, given: Any, model: Any) -> None:
    """Raise InvalidRequest unless the tensors are those of the modules that the config targets."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if not given:
        raise _unfit(f"{_TENSORS} has no tensors; save the adapter with PEFT's save_pretrained")
    if not config.target_modules:
        raise _unfit("target_modules is empty; name the linear layers that the adapter has")
    wanted = {name for name, _ in model.named_modules() if name and check_target_module_exists(config, name)}
    for name in sorted(wanted - given):
        raise _unfit(f"{_CONFIG} targets {name}, for which {_TENSORS} has no tensors{_HOW_TO_TARGET}")
    for name in sorted(given - wanted):
        raise _unfit(f"{_TENSORS} has tensors of {name}, which {_CONFIG} does not target; save both files together")


def _why_no_target(name: str, model: Any) -> str:
    module = dict(model.named_modules()).get(name)
    if module is None:
        return f"the model has no module {name}: the adapter is of another base model"
    return f"{name} ({type(module).__name__}) cannot have an adapter{_HOW_TO_TARGET}"


def _way_to_save(folder: Path) -> str:
    if (folder / _PICKLE).is_file():
        return f": {_PICKLE} is a pickle, which is never loaded; save the adapter with safe_serialization=True"
    return f"; an adapter is a folder with {_CONFIG} and {_TENSORS}, as PEFT's save_pretrained writes it"


def _unfit(why: str) -> InvalidRequest:
    return InvalidRequest(f"the adapter cannot be loaded: {why}", param="path")
