"""Model, device and sizes of the transformers engine: everything that is decided once, before the first request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.engine.arguments import check_known, parse_arguments
from proxy.engine.transformers.batching import PAGE_TOKENS, BatchSizes
from proxy.errors import ConfigurationError, InvalidRequest
from proxy.settings import Settings

_SMALL_MODEL = 20_000_000
"""Parameters below which one thread is faster than several: the work is smaller than handing it out."""

_DEFAULT_CACHE_MB = 4096

_OPTIONS = ("device", "threads", "cache_mb", "batch_tokens")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`--engine-arg` of this engine: torch device, CPU threads, key-value cache in MiB, tokens of a forward pass."""

    device: str | None = None
    threads: int | None = None
    cache_mb: int | None = None
    batch_tokens: int | None = None


def parse_options(arguments: tuple[str, ...]) -> EngineOptions:
    """Parse the engine's options from `key=value` texts. Raises ConfigurationError naming the one at fault."""
    given = parse_arguments(arguments)
    check_known(given, _OPTIONS, "the transformers engine")
    values: dict[str, Any] = dict(given)
    for key in given.keys() - {"device"}:
        if not (given[key].isdecimal() and int(given[key]) > 0):
            raise ConfigurationError(f"--engine-arg {key}={given[key]}: the value must be a positive integer")
        values[key] = int(given[key])
    return EngineOptions(**values)


def load_model(folder: Path, options: EngineOptions) -> Any:
    """The causal model of `folder` on its device, in evaluation mode. Raises ConfigurationError."""
    import torch

    quieten()
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"--model {folder} is not a folder with a Hugging Face model")
    device = options.device or best_device()
    try:
        model = read_model(folder, device).to(device)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last where torch was built without CUDA
        raise ConfigurationError(f"--model {folder} cannot be loaded on {device}: {error}") from error
    if model.device.type == "cpu":
        small = sum(weight.numel() for weight in model.parameters()) < _SMALL_MODEL
        torch.set_num_threads(options.threads or (1 if small else _cpus()))
    return model


def read_model(folder: Path, device: str) -> Any:
    """The model of `folder` in CPU memory; float32 for the CPU, its own dtype elsewhere. Looks on no hub."""
    from transformers import AutoModelForCausalLM

    dtype = "float32" if device == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    return model.eval()


def read_weights(folder: Path, model: Any) -> Mapping[str, Any]:
    """Weights of `folder`, checked to be for `model`, in its dtype. Raises InvalidRequest naming `path`."""
    if not (folder / "config.json").is_file():
        raise InvalidRequest(f"{folder} is not a folder with a Hugging Face model", param="path")
    try:
        weights: Mapping[str, Any] = read_model(folder, model.device.type).state_dict()
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"the weights in {folder} cannot be read: {error}", param="path") from error
    ours = {name: weight.shape for name, weight in model.state_dict().items()}
    theirs = {name: weight.shape for name, weight in weights.items()}
    if ours != theirs:
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        raise InvalidRequest(f"the weights in {folder} are for another model: {names[0]} differs", param="path")
    return weights


def choose_sizes(model: Any, settings: Settings, options: EngineOptions) -> BatchSizes:
    """A cache that holds the model's whole context (or --max-context-tokens) and a quarter more, if memory allows."""
    context = min(context_limit(model), settings.max_context_tokens or context_limit(model))
    budget = (options.cache_mb * 2**20) if options.cache_mb else _cache_budget(model)
    wanted = min(context + context // 4, budget // _bytes_per_token(model))
    batch_tokens = options.batch_tokens or (256 if model.device.type in ("cpu", "mps") else 1024)
    return BatchSizes(max(wanted // PAGE_TOKENS, 1) * PAGE_TOKENS, batch_tokens)


def context_limit(model: Any) -> int:
    """Prompt plus output, in tokens, that the model's positions reach."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 4096))


def end_token_ids(model: Any) -> tuple[int, ...]:
    """The tokens with which the model itself ends an output."""
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def quieten() -> None:
    """Let transformers speak of errors only, and draw no progress bars.

    Its batching logs what it then raises or hands over as well, and misses psutil loudly: it is silenced altogether.
    """
    import logging

    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


def best_device() -> str:
    """The torch device to run on where none was named: CUDA, else MPS, else the CPU."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bytes_per_token(model: Any) -> int:
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


def _cache_budget(model: Any) -> int:
    """Bytes: half of what a GPU has left, else a quarter of the memory of the machine and at most 4 GiB."""
    import torch

    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info()[0] // 2)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(int(memory) // 4, _DEFAULT_CACHE_MB * 2**20)
