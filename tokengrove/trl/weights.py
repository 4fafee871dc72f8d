"""TRL's WeightTransferProtocol over `/engine`: the trainer's weights are written to a folder, and the engine loads it.

The weight version is the trainer's own `model_version`: both are counted from 1, once for each transfer. An engine that
was paused here always runs again at the end, even after a failure.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokengrove.client import Client, operations
from tokengrove.client.options import PauseMode
from tokengrove.client.retries import LEAVE_S
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.rollout.retries import retried_here
from tokengrove.trl.shards import SHARD_BYTES, BaseModel

logger = logging.getLogger(__name__)

_READY_S = 240.0
"""Seconds that a server may take to start: TRL's default for a vLLM server."""


class WeightTransfer:
    """The `weight_transfer` of an `AsyncGRPOTrainer`.

    `model` is the trainer's model, a folder or a name on the hub; it provides the settings, and the weights that the
    trainer does not send. `folder`: where the weights are written, a path that the engine's machine can also read
    (default: a temporary folder of this machine); they are removed at the end. `mode`: what happens to running
    requests, as in `Client.pause`. `version` is the version of the weights on the server, 0 before the first transfer.
    """

    def __init__(
        self,
        url: str,
        admin_key: str | None = None,
        *,
        model: str | Path,
        folder: str | Path | None = None,
        mode: PauseMode = "abort",
        ready_s: float = _READY_S,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.version = 0
        self._client = Client(url, admin_key)
        self._model, self._folder = model, None if folder is None else Path(folder)
        self._mode, self._ready_s, self._shard_bytes = mode, ready_s, shard_bytes
        self._base: BaseModel | None = None
        self._place: Path | None = None
        self._paused = False

    def init_weight_transfer(self) -> None:
        """Wait until the server is ready, and create the folder.

        Raises ProxyError if the server is not ready in time, and InvalidRequest if its engine cannot load weights or
        `model` is not a model folder.
        """
        self._base = BaseModel(self._model)
        retried_here(self._client.ready, self._ready_s)
        state = self._client.engine()
        if "update_weights" not in state.capabilities:
            raise InvalidRequest(f"the engine {state.engine} of {self._client.url} loads no new weights")
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._place = Path(tempfile.mkdtemp(prefix="tokengrove-trl-", dir=self._folder))
        self._place.chmod(0o755)  # the engine may run as another user

    def pause(self) -> None:
        """Pause the engine; new requests wait."""
        self._client.pause(self._mode)
        self._paused = True

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Write the tensors, load them into the engine, and remove the tensors of the previous version.

        Raises RuntimeError if the engine rejects them; it then keeps its weights.
        """
        assert self._base is not None and self._place is not None, "init_weight_transfer comes first"
        began, version = time.monotonic(), self.version + 1
        folder = self._place / f"version-{version}"
        try:
            self._base.write(folder, iterator, self._shard_bytes)
            written = time.monotonic()
            self._client.update_weights(str(folder.absolute()), version=version, mode=self._mode)
        except (ProxyError, OSError) as error:
            raise RuntimeError(
                f"weights {version} have not reached {self._client.url}, which keeps those that it has: {error}. "
                f"Its engine must be able to read {self._place}; give `folder` a path that both machines can access"
            ) from error
        load_s = time.monotonic() - written
        logger.info("weights %d: written in %.3f s, loaded in %.3f s", version, written - began, load_s)
        shutil.rmtree(self._place / f"version-{self.version}", ignore_errors=True)
        self.version = version

    def resume(self) -> None:
        """End the pause."""
        self._client.resume()
        self._paused = False

    def destroy(self) -> None:
        """Remove the written weights and close the connections. A paused engine is resumed."""
        if self._paused:
            self._paused = False
            with suppress(ProxyError):  # no requests wait on a lost server
                self._client.run(operations.engine_step("continue_generation", {}), retry_s=LEAVE_S)
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = None
        self._client.close()
