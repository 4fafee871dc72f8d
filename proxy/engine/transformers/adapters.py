"""The LoRA adapters of one model: which are loaded, and the hooks that apply them to the rows of a step.

One forward pass serves requests with different adapters and without: the pass itself is that of the base model, and a
hook on each adapted linear layer adds, to the rows of each adapter, what PEFT would add, in float32. An adapter lives
as long as a request has it, also after it was unloaded.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.engine.interface import AdapterSource
from proxy.engine.transformers.adapter_files import Adapter, read_files, read_pairs
from proxy.engine.transformers.batching import ContinuousBatch, StepEntry
from tokengrove.errors import EngineUnavailable, InvalidRequest

if TYPE_CHECKING:
    import torch

_keys = itertools.count(1)


class _Step(NamedTuple):
    """The rows of a step. `total`: how many. `of`: those of each adapter, as an index."""

    total: int
    of: Sequence[tuple[Adapter, slice | torch.Tensor]]


class Adapters:
    """The adapters of one model. Methods may be called on any thread."""

    def __init__(self, model: Any, batch: ContinuousBatch) -> None:
        """Register a hook on `model`. Its linear layers get theirs on the batching thread, with their first adapter."""
        self._model, self._batch = model, batch
        self._linears = target_linears(model)
        self._hooked: set[str] = set()
        self._loaded: dict[int, Adapter] = {}
        self._lock = threading.Lock()
        self._step: _Step | None = None
        self._misfits: dict[int, str] = {}
        self._used = False
        model.register_forward_pre_hook(self._before_model)

    def load(self, version: int, source: AdapterSource) -> None:
        """Load an adapter. No effect if the same is already loaded under this version. Raises InvalidRequest."""
        files = read_files(source)
        digest = files.digest
        if self._is_loaded(version, digest):
            return
        adapter = Adapter(version, digest, next(_keys), read_pairs(files, self._model, self._linears))
        with self._lock:
            if not self._is_loaded(version, digest):
                self._used = True
                self._batch.prefix_keys.open(adapter.prefix_key)
                self._loaded[version] = adapter

    def unload(self, version: int) -> None:
        """Unload an adapter, if it is loaded. Requests that have it continue with it."""
        with self._lock:
            adapter = self._loaded.pop(version, None)
        if adapter is not None:
            self._batch.prefix_keys.close(adapter.prefix_key)

    def failure(self, adapter: Adapter) -> str:
        """Why an adapter could not be applied in the current step, or an earlier one; "" if it could."""
        return self._misfits.get(adapter.prefix_key, "")

    def named(self, version: int) -> Adapter:
        """The adapter of this version. Raises EngineUnavailable if it is not loaded."""
        adapter = self._loaded.get(version)
        if adapter is None:
            loaded = ", ".join(map(str, sorted(self._loaded))) or "none"
            raise EngineUnavailable(f"the adapter of version {version} is not loaded; loaded: {loaded}")
        return adapter

    def tensors(self) -> Iterator[torch.Tensor]:
        """The matrices of all loaded adapters."""
        with self._lock:
            loaded = [*self._loaded.values()]
        for adapter in loaded:
            for pair in adapter.pairs.values():
                yield from (pair.a, pair.b)

    def _is_loaded(self, version: int, digest: str) -> bool:
        """Raises InvalidRequest if another adapter is loaded under this version."""
        loaded = self._loaded.get(version)
        if loaded is not None and loaded.digest != digest:
            why = f"another adapter is loaded as version {version}; unload it first, or use a new version"
            raise InvalidRequest(why, param="version")
        return loaded is not None

    # The methods below run on the batching thread.

    def _before_model(self, module: Any, args: tuple[Any, ...]) -> None:
        self._step = None
        if not self._used:
            return
        self._step = _rows_of(self._batch.entries(), self._model.device)
        for adapter, _ in () if self._step is None else self._step.of:
            for name in adapter.pairs.keys() - self._hooked:
                self._hook(name)

    def _hook(self, name: str) -> None:
        self._hooked.add(name)

        def add(module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            return None if self._step is None else self._added(self._step, name, args[0], output)

        self._linears[name].register_forward_hook(add)

    def _added(self, step: _Step, name: str, given: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
        """`output` of a linear layer with what the adapters add to their rows; None if none has this layer."""
        from torch.nn.functional import linear

        adapted = [(adapter, rows) for adapter, rows in step.of if name in adapter.pairs]
        if not adapted:
            return None
        flat, result = given.reshape(-1, given.shape[-1]), output.reshape(-1, output.shape[-1])
        if flat.shape[0] != step.total:
            why = f"the layer {name} does not take in every token; train an adapter without it"
            self._misfits.update((adapter.prefix_key, why) for adapter, _ in adapted)
            return None
        for adapter, rows in adapted:
            pair = adapter.pairs[name]
            part = flat[rows].to(pair.a.dtype)
            result[rows] = (result[rows] + linear(linear(part, pair.a), pair.b) * pair.scaling).to(result.dtype)
        return result.reshape(output.shape)


def target_linears(model: Any) -> Mapping[str, Any]:
    """The linear layers that may have an adapter, by name: those of the decoder that take in every token.

    Those of experts, in a list of modules of their own or under the name `experts`, take in the tokens that chose them.
    """
    import torch

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    prefix = next((f".{name}." for name, module in model.named_modules() if name and module is decoder), "")
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and f".{name}".startswith(prefix) and _takes_every_token(name)
    }


def _takes_every_token(name: str) -> bool:
    parts = name.split(".")
    return sum(part.isdecimal() for part in parts) == 1 and "experts" not in parts


def _rows_of(entries: Sequence[StepEntry], device: torch.device) -> _Step | None:
    """The rows of a step by adapter; None if no request of it has one."""
    spans: dict[Adapter, list[tuple[int, int]]] = {}
    at = 0
    for entry in entries:
        if entry.adapter is not None:
            found = spans.setdefault(entry.adapter, [])
            if found and found[-1][1] == at:
                found[-1] = (found[-1][0], at + entry.processed)
            else:
                found.append((at, at + entry.processed))
        at += entry.processed
    rows = [(adapter, _index(found, device)) for adapter, found in spans.items()]
    return _Step(at, rows) if rows else None


def _index(spans: Sequence[tuple[int, int]], device: torch.device) -> slice | torch.Tensor:
    import torch

    if len(spans) == 1:
        return slice(*spans[0])
    return torch.cat([torch.arange(*span) for span in spans]).to(device)
