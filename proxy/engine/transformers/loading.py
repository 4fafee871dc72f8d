"""Options, model, device and cache sizes of the transformers engine, all determined once at start."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.engine.arguments import check_known, parse_arguments
from proxy.engine.transformers.batching import PAGE_TOKENS, BatchSizes
from proxy.engine.transformers.latent_attention import cached_width
from proxy.hub import WEIGHTS
from proxy.progress import doing
from proxy.settings import Settings
from tokengrove.errors import ConfigurationError, InvalidRequest, how_to_get

_SMALL_MODEL = 20_000_000
"""The number of model parameters below which one CPU thread is faster than several, due to the overhead of threads."""

_DEFAULT_CACHE_MB = 4096

_OPTIONS = ("device", "threads", "cache_mb", "batch_tokens", "unmasked_logprobs", "image_cache_mb")
_NUMBERS = ("threads", "cache_mb", "batch_tokens", "image_cache_mb")

SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""The kinds of models (`model_type`) for which this engine supports images. It samples other models with text only."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The `--engine-arg` options. `device`, `threads`, `cache_mb` and `batch_tokens` None: chosen automatically.

    `device`: the torch device. `threads`: CPU threads. `cache_mb`: the KV cache in MiB. `batch_tokens`: tokens per
    forward pass. `unmasked_logprobs`: also report the logprobs of answers under a grammar without its mask.
    `image_cache_mb`: the cache of image features in MiB.
    """

    device: str | None = None
    threads: int | None = None
    cache_mb: int | None = None
    batch_tokens: int | None = None
    unmasked_logprobs: bool = False
    image_cache_mb: int = 512


def parse_options(arguments: tuple[str, ...]) -> EngineOptions:
    """Parse the engine's options from `key=value` texts. Raises ConfigurationError naming the wrong option."""
    given = parse_arguments(arguments)
    check_known(given, _OPTIONS, "the transformers engine")
    values: dict[str, Any] = dict(given)
    if (asked := given.get("unmasked_logprobs")) is not None:
        if asked not in ("true", "false"):
            raise ConfigurationError(f"--engine-arg unmasked_logprobs={asked}: the value must be true or false")
        values["unmasked_logprobs"] = asked == "true"
    for key in given.keys() & set(_NUMBERS):
        if not (given[key].isdecimal() and int(given[key]) > 0):
            raise ConfigurationError(f"--engine-arg {key}={given[key]}: the value must be a positive integer")
        values[key] = int(given[key])
    return EngineOptions(**values)


def load_model(folder: Path, options: EngineOptions) -> Any:
    """Load the causal language model in `folder` onto its device. Raises ConfigurationError."""
    with doing("importing torch and transformers"):
        _check_imports()
        import torch

        quieten()
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"--model {folder} is not a Hugging Face model folder (it has no config.json)")
    device = options.device or best_device()
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise ConfigurationError(f"--engine-arg device={device} is no device of this torch: {error}") from None
    megabytes = sum(path.stat().st_size for kind in WEIGHTS for path in folder.glob(kind)) / 1e6
    try:
        with doing(f"loading the weights in {folder} ({megabytes:,.1f} MB) on {device}"):
            model = read_model(folder, device).to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"--model {folder} cannot be loaded on {device}: {error}") from error
    if model.device.type == "cpu":
        small = sum(weight.numel() for weight in model.parameters()) < _SMALL_MODEL
        torch.set_num_threads(options.threads or (1 if small else _cpus()))
    return model


def read_model(folder: Path, device: str) -> Any:
    """Load a model into CPU memory, in float32 if `device` is the CPU, else in its own dtype. Never downloads files."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = AutoModelForImageTextToText if config.model_type in SEEING else AutoModelForCausalLM
    dtype = "float32" if device == "cpu" else "auto"
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    return model.eval()


def read_weights(folder: Path, model: Any) -> Mapping[str, Any]:
    """Load the weights in `folder`. Raises InvalidRequest naming `path` unless their names and shapes fit `model`."""
    if not (folder / "config.json").is_file():
        raise InvalidRequest(f"{folder} is not a Hugging Face model folder (it has no config.json)", param="path")
    try:
        weights: Mapping[str, Any] = read_model(folder, model.device.type).state_dict()
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"the weights in {folder} cannot be read: {error}", param="path") from error
    ours = {name: weight.shape for name, weight in model.state_dict().items()}
    theirs = {name: weight.shape for name, weight in weights.items()}
    if ours != theirs:
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise InvalidRequest(
            f"the weights in {folder} are of another model: {names[0]} is missing or has another shape", param="path"
        )
    return weights


def choose_sizes(model: Any, settings: Settings, options: EngineOptions) -> BatchSizes:
    """Sizes for a cache of the context length (or --max-context-tokens) plus a quarter, if memory allows."""
    context = min(context_limit(model), settings.max_context_tokens or context_limit(model))
    budget = (options.cache_mb * 2**20) if options.cache_mb else _cache_budget(model)
    wanted = min(context + context // 4, budget // _bytes_per_token(model))
    batch_tokens = options.batch_tokens or (256 if model.device.type in ("cpu", "mps") else 1024)
    return BatchSizes(max(wanted // PAGE_TOKENS, 1) * PAGE_TOKENS, batch_tokens)


def context_limit(model: Any) -> int:
    """The maximum of prompt plus output, in tokens, that the model's positions allow."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 4096))


def end_token_ids(model: Any) -> tuple[int, ...]:
    """The end tokens in the model's generation config."""
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def _check_imports() -> None:
    """Raise ConfigurationError with the cause if torch or transformers is installed and cannot be imported."""
    for package in ("torch", "transformers"):
        try:
            importlib.import_module(package)
        except Exception as error:  # such as OSError for a shared library
            raise ConfigurationError(
                f"the package {package} cannot be imported ({type(error).__name__}: {error}); install it again: "
                f"{how_to_get('tokengrove[cpu]')}"
            ) from error


def quieten() -> None:
    """Make transformers log only errors, and show no progress bars.

    Its batching logs failures that it also raises or returns, and warns of a missing psutil, so its logger is silenced.
    """
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()  # its records go through the root logger
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


def best_device() -> str:
    """The default torch device: CUDA, else MPS, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _cpus() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bytes_per_token(model: Any) -> int:
    """Bytes of keys and values per token: 2 x layers x KV heads x head width x bytes per value."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * cached_width(config) * model.dtype.itemsize)


def _cache_budget(model: Any) -> int:
    """Bytes for the KV cache: half of a GPU's free memory, else a quarter of the machine's memory, at most 4 GiB."""
    import torch

    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info()[0] // 2)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(memory) // 4, _DEFAULT_CACHE_MB * 2**20)
