"""Writes a stream of tensors into a Hugging Face model folder, which an engine can load.

The folder is complete: it contains the settings of the base model, the received tensors, and the base model's tensors
that were not received, since a trainer only sends what it trains. At most one file's tensors are kept in memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokengrove.client.libraries import library
from tokengrove.errors import InvalidRequest

SHARD_BYTES = 4 * 2**30
"""The maximum size of the tensors of one file; a larger tensor has its own file."""

_WEIGHTS = "*.safetensors"
_INDEX = "model.safetensors.index.json"


class BaseModel:
    """The model that training began with: a folder, or the name of a model on the Hugging Face hub in the local cache.

    Raises InvalidRequest if it is not a Hugging Face folder with safetensors.
    """

    def __init__(self, model: str | Path) -> None:
        folder = Path(model) if Path(model).is_dir() else _fetched(str(model))
        if not (folder / "config.json").is_file():
            raise InvalidRequest(f"{folder} is no Hugging Face model folder: it has no config.json", param="model")
        self._folder = folder
        self._files = {name: path for path in sorted(folder.glob(_WEIGHTS)) for name in _names(path)}
        if not self._files:
            raise InvalidRequest(f"{folder} has no *.safetensors file; save it with save_pretrained", param="model")

    def write(self, folder: Path, tensors: Iterator[tuple[str, Any]], shard_bytes: int = SHARD_BYTES) -> None:
        """Write a complete model into the new folder `folder`. Raises InvalidRequest for tensors of another model."""
        folder.mkdir(parents=True)
        self._copy_settings(folder)
        shards = _Shards(folder, shard_bytes)
        for name, tensor in tensors:
            shards.add(name, tensor)
        self._complete(shards)
        shards.close()

    def _copy_settings(self, folder: Path) -> None:
        for path in self._folder.glob("*.json"):
            if path.name != _INDEX:
                shutil.copy(path, folder)

    def _complete(self, shards: _Shards) -> None:
        """Add the tensors of the base model that were not received."""
        missing = [name for name in self._files if name not in shards.files]
        unknown = [name for name in shards.files if name not in self._files]
        if missing and unknown:
            raise InvalidRequest(
                f"the trainer sends {unknown[0]!r}, which {self._folder} does not have, and no {missing[0]!r}, which "
                "it has: the tensor names of its checkpoint differ from those of the model",
                param="model",
            )
        for name in missing:
            with library("safetensors").safe_open(self._files[name], framework="pt") as file:
                shards.add(name, file.get_tensor(name))


class _Shards:
    """The files of one folder. `files`: the file's name by tensor."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most = folder, most_bytes
        self._held: dict[str, Any] = {}
        self._bytes = self._total = 0
        self._written = 0
        self.files: dict[str, str] = {}

    def add(self, name: str, tensor: Any) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._held and self._bytes + size > self._most:
            self._flush()
        # A copy: the trainer's tensor may be part of a larger storage, or change while others are collected.
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._bytes += size
        self._total += size
        self.files[name] = self._file_name()

    def close(self) -> None:
        self._flush()
        index = {"metadata": {"total_size": self._total}, "weight_map": self.files}
        (self._folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")

    def _flush(self) -> None:
        if self._held:
            save: Any = library("safetensors.torch").save_file
            save(self._held, self._folder / self._file_name(), metadata={"format": "pt"})
            self._held, self._bytes = {}, 0
            self._written += 1

    def _file_name(self) -> str:
        return f"model-{self._written + 1:05}.safetensors"


def _names(path: Path) -> Mapping[str, None]:
    with library("safetensors").safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys())


def _fetched(name: str) -> Path:
    """The folder of a model in the local cache of the hub. Raises InvalidRequest if it is not there."""
    try:
        folder = library("huggingface_hub").snapshot_download(
            name, local_files_only=True, allow_patterns=["*.json", _WEIGHTS]
        )
    except (OSError, ValueError) as error:  # not in the cache, or not the name of a model
        raise InvalidRequest(
            f"{name} is neither a folder nor a model in the local cache of the hub: {error}", param="model"
        ) from None
    return Path(folder)
