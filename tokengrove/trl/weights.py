"""TRL's WeightTransferProtocol over `/engine`: the trainer's weights become a folder, which the server's engine loads.

The version of the weights is the trainer's own `model_version`: both are counted from 1, once for each transfer. An
engine that this has paused runs again at the end, whatever failed in between.
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
"""How long a server may take to start: as long as TRL waits for a vLLM server by default."""


class WeightTransfer:
    """For `AsyncGRPOTrainer(weight_transfer=...)`.

    `model` is what the trainer was given, a folder or a name on the hub: its settings, and the weights that the trainer
    does not send.
    `folder` is where the weights are written, a place that the engine's machine reads too (default: a temporary folder
    of this machine); what is written there is removed at the end. `mode` says what happens to answers that are being
    sampled, as of `Client.pause`. `version` is that of the weights on the server, 0 before the first transfer.
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
        """Wait until the server is ready, and make the folder.

        Raises ProxyError if the server is not ready in time, InvalidRequest if its engine loads no weights or `model`
        is no model folder.
        """
        self._base = BaseModel(self._model)
        retried_here(self._client.ready, self._ready_s)
        state = self._client.engine()
        if "update_weights" not in state.capabilities:
            raise InvalidRequest(f"the engine {state.engine} of {self._client.url} loads no new weights")
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._place = Path(tempfile.mkdtemp(prefix="tokengrove-trl-", dir=self._folder))
        self._place.chmod(0o755)  # the engine may be another user's

    def pause(self) -> None:
        """Pause the engine; requests that come meanwhile wait."""
        self._client.pause(self._mode)
        self._paused = True

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Write the tensors, have the engine load them, and remove the tensors of the version before.

        Raises RuntimeError if the engine does not take them: it keeps its weights then.
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
                f"Its engine has to read {self._place}; give `folder` a place that both machines have"
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
        """Remove what was written and close the connections. An engine that is still paused runs again."""
        if self._paused:
            self._paused = False
            with suppress(ProxyError):  # a server that is gone has nothing that waits
                self._client.run(operations.engine_step("continue_generation", {}), retry_s=LEAVE_S)
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = None
        self._client.close()
