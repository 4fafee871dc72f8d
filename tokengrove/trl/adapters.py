"""TRL's WeightTransferProtocol for a model with a LoRA adapter: only the adapter is sent, as a new version.

Nothing pauses: turns go on with the versions that they began with, and new sessions begin with the new one. The version
is the trainer's own `model_version`: both are counted from 1, once for each transfer.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokengrove.client import Client
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.rollout.retries import retried_here

logger = logging.getLogger(__name__)

_READY_S = 240.0
_FILES = ("adapter_config.json", "adapter_model.safetensors")


def save_adapter(model: Any, folder: str | Path) -> Path:
    """Save the active LoRA adapter of a `PeftModel`, and return the folder with its two files: `folder` or one in it.

    Raises InvalidRequest if the model has no such adapter, or if only parts of its tensors are in this process.
    """
    name = getattr(model, "active_adapter", None)
    if not isinstance(name, str) or not hasattr(model, "peft_config"):
        raise InvalidRequest("the model has no active adapter; wrap it with peft.get_peft_model first", param="model")
    for key, tensor in model.named_parameters():
        if "lora_" in key and (not tensor.numel() or hasattr(tensor, "full_tensor")):
            raise InvalidRequest(
                f"{key} is sharded over several processes: gather the adapter, save it, and publish its folder with "
                "Client.publish_adapter(path=...)",
                param="model",
            )
    model.save_pretrained(str(folder), selected_adapters=[name])
    saved = Path(folder) if name == "default" else Path(folder) / name
    missing = [file for file in _FILES if not (saved / file).is_file()]
    if missing:
        raise InvalidRequest(f"the model was saved without {missing[0]}: it has no LoRA adapter", param="model")
    return saved


def publish_adapter(
    client: Client, model: Any, *, folder: str | Path | None = None, version: int | None = None, name: str | None = None
) -> int:
    """Publish the active LoRA adapter of a `PeftModel`; return its version. `version`, `name`: see the client's method.

    `folder`: a new folder to save it in, which the engine can read too. None: its bytes are sent, which the server must
    allow (`--max-body-bytes`). Raises the errors of the client's method and of `save_adapter`.
    """
    if folder is not None:
        saved = save_adapter(model, folder)
        return client.publish_adapter(str(saved.absolute()), version=version, name=name)
    with tempfile.TemporaryDirectory(prefix="tokengrove-adapter-") as place:
        config, tensors = _read(save_adapter(model, place))
    return client.publish_adapter(config=config, tensors=tensors, version=version, name=name)


def _read(folder: Path) -> tuple[Mapping[str, Any], bytes]:
    return json.loads((folder / _FILES[0]).read_text("utf-8")), (folder / _FILES[1]).read_bytes()


class AdapterTransfer:
    """The `weight_transfer` of an `AsyncGRPOTrainer` that trains a LoRA adapter.

    `model` is the trainer's `PeftModel`. `folder`: where adapters are saved, a path that the engine's machine can also
    read; those that are no longer live are removed. None: their bytes are sent. `name`: the model, if the server has
    several policies. `version` is the newest version on the server, 0 before the first transfer.
    """

    def __init__(
        self,
        url: str,
        admin_key: str | None = None,
        *,
        model: Any,
        folder: str | Path | None = None,
        name: str | None = None,
        ready_s: float = _READY_S,
    ) -> None:
        self.version = 0
        self._client = Client(url, admin_key)
        self._model, self._name, self._ready_s = model, name, ready_s
        self._folder = None if folder is None else Path(folder)
        self._place: Path | None = None

    def init_weight_transfer(self) -> None:
        """Wait until the server is ready. Raises ProxyError if it is not ready in time, and InvalidRequest if its
        engine loads no adapters."""
        retried_here(self._client.ready, self._ready_s)
        state = self._client.engine()
        if "adapters" not in state.capabilities:
            raise InvalidRequest(f"the engine {state.engine} of {self._client.url} loads no adapters")
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._place = Path(tempfile.mkdtemp(prefix="tokengrove-trl-", dir=self._folder))
            self._place.chmod(0o755)  # the engine may run as another user

    def pause(self) -> None:
        """Do nothing: several versions serve at once."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publish the adapter of the model. The tensors are dropped: they are the whole model's.

        They are read, because each of the trainer's processes takes part in gathering them. Raises RuntimeError if the
        adapter was not published.
        """
        deque(iterator, maxlen=0)
        began, version = time.monotonic(), self.version + 1
        folder = None if self._place is None else self._place / f"version-{version}"
        try:
            publish_adapter(self._client, self._model, folder=folder, version=version, name=self._name)
        except (ProxyError, OSError) as error:
            raise RuntimeError(f"adapter {version} was not published on {self._client.url}: {error}") from error
        logger.info("adapter %d: published in %.3f s", version, time.monotonic() - began)
        self.version = version
        self._remove_unloaded()

    def resume(self) -> None:
        """Do nothing: nothing was paused."""

    def destroy(self) -> None:
        """Remove the saved adapters and close the connections. The server keeps what it has loaded."""
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = None
        self._client.close()

    def _remove_unloaded(self) -> None:
        """Remove the saved adapters that no server loads any more."""
        if self._place is None:
            return
        try:
            live = [Path(entry["path"]) for route in self._client.adapters() for entry in route["live"]]
        except ProxyError:  # the adapter is published; the next transfer looks again
            return
        for folder in self._place.iterdir():
            if not any(path.is_relative_to(folder.absolute()) for path in live):
                shutil.rmtree(folder, ignore_errors=True)
