"""Adapters that trainers sent as bytes, as folders in PEFT's layout until they are unloaded."""

from __future__ import annotations

import errno
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from proxy.engine.interface import AdapterSource
from tokengrove.errors import InvalidRequest, ScratchFull

_LENGTH_BYTES = 8
_FULL = (errno.ENOSPC, errno.EDQUOT)


class AdapterFiles:
    """The folders of one server, in one temporary folder that only its user can read. `close` removes all of them."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._making = threading.Lock()

    def write(self, config: Mapping[str, Any], tensors: bytes) -> AdapterSource:
        """Write an adapter into a new folder. It takes a while, so call it in a thread.

        Raises InvalidRequest if `tensors` is no safetensors file, and ScratchFull if the disk is full.
        """
        check_safetensors(tensors)
        folder: Path | None = None
        try:
            with self._making:
                if self._root is None:
                    self._root = Path(tempfile.mkdtemp(prefix="tokengrove-adapters-"))
            folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._root))
            (folder / "adapter_config.json").write_bytes(orjson.dumps(config))
            (folder / "adapter_model.safetensors").write_bytes(tensors)
        except OSError as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if error.errno not in _FULL:
                raise
            raise ScratchFull(
                f"the adapter cannot be written to {tempfile.gettempdir()}: {error.strerror}; free space there, name "
                "another folder in TMPDIR, or send 'path'"
            ) from None
        return AdapterSource(str(folder), config, tensors)

    def remove(self, source: AdapterSource) -> None:
        """Remove the folder of an adapter, if `write` made it."""
        if self._root is not None and Path(source.path).parent == self._root:
            shutil.rmtree(source.path, ignore_errors=True)

    def close(self) -> None:
        """Remove all folders."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None


def check_safetensors(tensors: bytes) -> None:
    """Raise InvalidRequest unless the bytes are a whole safetensors file: a length, a JSON header, and its tensors."""
    length = int.from_bytes(tensors[:_LENGTH_BYTES], "little")
    header = tensors[_LENGTH_BYTES : _LENGTH_BYTES + length]
    try:
        if len(tensors) < _LENGTH_BYTES or len(header) < length:
            raise ValueError("it ends within its header")
        entries = [entry for name, entry in orjson.loads(header).items() if name != "__metadata__"]
        size = max((int(entry["data_offsets"][1]) for entry in entries), default=0)
        if not entries or _LENGTH_BYTES + length + size != len(tensors):
            raise ValueError(f"its header names {len(entries)} tensors that end at byte {size}")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise InvalidRequest(
            f"'tensors' is no safetensors file: {error}; send the bytes of adapter_model.safetensors in base64",
            param="tensors",
        ) from None
