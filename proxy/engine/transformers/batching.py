"""transformers' continuous batching with our sampler. No other module uses its internals.

There are five hooks, the same in transformers 5.19 to 5.23. `ModelRunner._sample(scores, output_ids)` receives the
logits of every request that takes a token in this step, and writes the tokens. `ModelRunner.compute_batch(model,
batch_data)` is given the positions whose logits are computed, to which those of scored prompts are added.
`CacheAllocator.register_cache_tensor` replaces the tensor of the KV cache, and its `block_table` says in which blocks a
request has its keys and values. `PagedAttentionCache.search_prefix_match` and `CacheAllocator.mark_complete_blocks`
find and announce shared prefixes.
`check_hooks` and `check_cache` verify at start that they exist. A pause parks the batching thread between two steps;
only then may `forget`, `free_cache` and `allocate_cache` be called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxy.engine.transformers.adapter_files import Adapter
from proxy.engine.transformers.latent_attention import pad_updates, widened
from proxy.engine.transformers.prefix_keys import PrefixKeys
from tokengrove.errors import ConfigurationError, EngineFailed

if TYPE_CHECKING:
    import torch

PAGE_TOKENS = 32
"""Tokens per cache page. Prefixes are shared in whole pages, so small pages share more, at a small cost."""


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Limits in tokens: of the KV cache for all requests, and of one forward pass (prefill included)."""

    cache_tokens: int
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class StepEntry:
    """One request in a step.

    `processed`: the number of its tokens that the model processes. `first`: the position of the first of them in its
    sequence. `takes_token`: it takes a new token in this step. `carried`, `adapter`, `scored_from`: as submitted with
    it.
    """

    serial: str
    processed: int
    takes_token: bool
    first: int
    carried: Any = None
    adapter: Adapter | None = None
    scored_from: int | None = None

    @property
    def scored(self) -> range:
        """The positions of the step whose logits are those of scored tokens, each one before its token."""
        if self.scored_from is None:
            return range(0)
        end = self.first + self.processed
        return range(max(self.first, self.scored_from - 1), end - 1 if self.takes_token else end)


class _Loaded(str):
    """A serial that carries objects, which a cancelled request needs if it runs one more step."""

    carried: Any = None
    adapter: Adapter | None = None
    prefix_key = 0
    scored_from: int | None = None


StepSampler = Callable[[Sequence[StepEntry], "torch.Tensor", "torch.Tensor"], Sequence[int]]
"""A function of all entries of a step, the float32 logits [takers, vocabulary] of the entries that take a token, in
order, and those [positions, vocabulary] at the `scored` positions of all entries, in order. It returns one token per
taker. It runs on the batching thread, and must not raise if one request fails."""


class ContinuousBatch:
    """Requests that are decoded together, each under a unique serial.

    Methods may be called from any thread, except that `pause` and `unpause` must always be called from the same thread.
    """

    def __init__(self, model: Any, sizes: BatchSizes, sampler: StepSampler) -> None:
        self._model = model
        self._sizes = sizes
        self._sampler = sampler
        self._manager: Any = None
        self._keys: PrefixKeys | None = None
        self._paused: AbstractContextManager[None] | None = None
        self._compute: Callable[..., None]
        self._entries: list[StepEntry] = []
        self._scored = 0

    def start(self) -> None:
        """Allocate the cache and start the batching thread. Raises ConfigurationError."""
        check_hooks()
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=self._sizes.cache_tokens // PAGE_TOKENS,
            max_batch_tokens=self._sizes.batch_tokens,
            max_requests_per_batch=self._sizes.batch_tokens,
            use_async_batching=False,  # the next step is planned after the host has sampled
            use_cuda_graph=False,
            auto_switch_to_flash=False,  # it would look for kernels on the Hugging Face hub
        )
        text_config = self._model.config.get_text_config()
        try:
            self._manager = self._model.init_continuous_batching(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1), continuous_batching_config=config
            )
            with widened(text_config):
                self._manager.warmup()  # creates the processor, so that the sampler is in place before the first step
        except (MemoryError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"transformers cannot run this model in continuous batching: {error}") from error
        check_cache(self._manager.batch_processor.cache)
        pad_updates(self._manager.batch_processor.cache, text_config)
        self._keys = PrefixKeys(self._manager.batch_processor.cache, self._sharing)
        runner = self._manager.batch_processor.model_runner
        runner._sample, self._compute = self._sample, runner.compute_batch
        runner.compute_batch = self._computed
        self._manager.start()

    @property
    def alive(self) -> bool:
        """True while the batching thread runs."""
        return self._manager is not None and bool(self._manager.is_running())

    @property
    def reason_of_death(self) -> str:
        """The error message for a batching thread that has ended, with the reason if known."""
        error = self._manager.background_thread_status.fatal_error
        return "the engine's batching thread has ended" + (f": {error}" if error is not None else "")

    def submit(
        self,
        serial: str,
        ids: Sequence[int],
        max_tokens: int,
        stop_token_ids: Sequence[int],
        carried: Any = None,
        adapter: Adapter | None = None,
        scored_from: int | None = None,
    ) -> None:
        """Queue a request. Raises EngineFailed if the batching thread has ended.

        `carried`, `adapter`: each `StepEntry` of the request carries them. Requests share prefixes only with requests
        of the same adapter. `scored_from`: the position of the first token of the prompt whose logits the sampler gets.
        """
        if carried is not None or adapter is not None or scored_from is not None:
            serial = _Loaded(serial)
            serial.carried, serial.adapter, serial.scored_from = carried, adapter, scored_from
            serial.prefix_key = 0 if adapter is None else adapter.prefix_key
        taken = self._manager.add_request(
            list(ids), request_id=serial, max_new_tokens=max_tokens, eos_token_id=list(stop_token_ids) or [-1]
        )
        if taken is None:
            raise EngineFailed(self.reason_of_death)

    @property
    def prefix_keys(self) -> PrefixKeys:
        """The keys of shared prefixes; valid after `start`."""
        assert self._keys is not None
        return self._keys

    def cancel(self, serial: str) -> None:
        """Free a request before the next step; an unknown serial is ignored."""
        self._manager.cancel_request(serial)

    def next_failure(self, timeout_s: float) -> tuple[str, str] | None:
        """Return serial and reason of a request that failed in transformers, or None within `timeout_s` seconds."""
        output = self._manager.get_result(timeout=timeout_s)
        return (output.request_id, output.error) if output is not None and output.error is not None else None

    def entries(self) -> list[StepEntry]:
        """The requests of the current step, in the order of their tokens. Call it only on the batching thread."""
        futures = self._manager.batch_processor.inputs_and_outputs.requests_in_batch
        entries = []
        for future in futures:
            state, count = future.state, future.query_length
            serial, first = state.request_id, state.position_offset - count
            if isinstance(serial, _Loaded):
                loads = serial.carried, serial.adapter, serial.scored_from
                entries.append(StepEntry(serial, count, future.has_new_token, first, *loads))
            else:
                entries.append(StepEntry(serial, count, future.has_new_token, first))
        return entries

    @property
    def slot_count(self) -> int:
        """The number of slots in the cache, each for the keys and values of one token; 0 if no prefix is shared."""
        allocator = self._sharing
        if allocator is None:
            return 0
        blocks = self._manager.batch_processor.cache.cache_tensor.numel() // allocator.bytes_per_block
        return int(blocks * allocator.tokens_per_page)

    def slots(self, serial: str, first: int, count: int) -> NDArray[np.int64] | None:
        """The slots, [count], of a request's tokens from position `first` on; None if no prefix is shared.

        The request must be in the current step, and the step's last token bounds the positions. Call it only on the
        batching thread.
        """
        allocator = self._sharing
        if allocator is None:
            return None
        page = int(allocator.tokens_per_page)
        positions = np.arange(first, first + count)
        blocks = np.array(allocator.block_table[serial][first // page :], np.int64)
        return blocks[positions // page - first // page] * page + positions % page

    @property
    def _sharing(self) -> Any:
        """The allocator of the blocks that requests may share, one for all layers; None if they share none."""
        cache = self._manager.batch_processor.cache
        return next(iter(cache.cache_allocators.values())) if cache.use_prefix_sharing else None

    def pause(self) -> None:
        """Park the batching thread between two steps. No effect if it is parked. Raises EngineFailed."""
        if self._paused is None:
            paused = self._manager.pause()
            try:
                paused.__enter__()
            except RuntimeError as error:
                raise EngineFailed(f"the engine cannot pause: {error}") from error
            self._paused = paused

    def unpause(self) -> None:
        """Let the batching thread continue. No effect unless it is parked."""
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.__exit__(None, None, None)

    @property
    def paused(self) -> bool:
        """True while the batching thread is parked."""
        return self._paused is not None

    def forget(self) -> None:
        """Drop all scheduled requests and all cached keys and values. The batching thread must be parked."""
        self._manager.batch_processor.reset()
        self._manager.batch_processor.cache.reset()

    def free_cache(self) -> None:
        """Free the KV cache and the attention masks, which must have no request. No effect if already freed."""
        self._store_cache_on("meta")  # tensors without memory: a step raises instead of reading invalid memory

    def allocate_cache(self, device: torch.device) -> None:
        """Allocate an empty KV cache and attention masks on `device` again. Raises RuntimeError without memory."""
        try:
            self._store_cache_on(device)
            self.forget()  # also fills the attention masks
        except RuntimeError:
            self.free_cache()
            raise

    def _store_cache_on(self, device: torch.device | str) -> None:
        import torch

        processor = self._manager.batch_processor
        cache, masks = processor.cache, processor.inputs_and_outputs.attention_mask
        cache.cache_tensor = torch.zeros(cache.cache_tensor.shape, dtype=torch.uint8, device=device)
        trash_bytes = 2 * cache.bytes_per_sector
        for allocator in cache.cache_allocators.values():
            allocator.register_cache_tensor(
                cache.bytes_per_sector, cache.cache_tensor.numel() - trash_bytes, cache.cache_tensor, cache.pool
            )
        for kind, mask in (masks or {}).items():
            masks[kind] = torch.empty(mask.shape, dtype=mask.dtype, device=device)

    def stop(self, timeout_s: float) -> None:
        """Stop the batching thread after its current step, within `timeout_s` seconds. Its requests fail."""
        if self._manager is None:
            return
        self.unpause()
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=timeout_s, hard_stop=True)

    def _computed(self, model: Any, batch_data: dict[str, Any]) -> None:
        """Replaces `ModelRunner.compute_batch`: the logits of scored positions are computed too, after the takers'."""
        import torch

        places, at = list[int](), 0
        self._entries = self.entries()
        for entry in self._entries:
            if entry.scored_from is not None:
                places += [at + position - entry.first for position in entry.scored]
            at += entry.processed
        self._scored = len(places)
        if places:
            takers = sum(entry.takes_token for entry in self._entries)
            indices = batch_data["logits_indices"][:takers]  # without padding
            more = torch.tensor(places, dtype=indices.dtype, device=indices.device)
            batch_data["logits_indices"] = torch.cat([indices, more])
        self._compute(model, batch_data)

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Replaces `ModelRunner._sample`: reads `scores` [1, logits, vocabulary], writes tokens to `output_ids[0]`.

        The first logits are those of the takers, then come those of scored positions, or padding.
        """
        import torch

        entries = self._entries
        takers = sum(entry.takes_token for entry in entries)
        tokens = self._sampler(entries, scores[0, :takers], scores[0, takers : takers + self._scored])
        output_ids[0, :takers].copy_(torch.tensor(tokens, dtype=output_ids.dtype))


def check_hooks() -> None:
    """Raise ConfigurationError unless this version of transformers has the hooks with the expected signatures."""
    import transformers

    try:
        from transformers.generation.continuous_batching.cache import PagedAttentionCache
        from transformers.generation.continuous_batching.cache_allocators import CacheAllocator
        from transformers.generation.continuous_batching.model_runner import ModelRunner
        from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

        found = _takes(ModelRunner._sample, "scores", "output_ids")
        found = found and _takes(ModelRunner.compute_batch, "model", "batch_data")
        found = found and {"state", "has_new_token", "query_length"} <= set(FutureRequestState.__slots__)
        found = found and "position_offset" in RequestState.__dataclass_fields__
        register = CacheAllocator.register_cache_tensor
        found = found and _takes(register, "bytes_per_sector", "non_trash_bytes", "cache_tensor", "pool")
        found = found and _takes(PagedAttentionCache.update, "key_states", "value_states", "layer_idx", "kwargs")
        found = found and _takes(PagedAttentionCache.search_prefix_match, "request_id", "prompt_ids")
        found = found and len(inspect.signature(CacheAllocator.mark_complete_blocks).parameters) == 4
    except (ImportError, AttributeError):
        found = False
    if not found:
        raise _unfit(transformers.__version__)


def check_cache(cache: Any) -> None:
    """Raise ConfigurationError unless the cache tells in which blocks requests have their keys and values."""
    import transformers

    allocators = getattr(cache, "cache_allocators", {})
    told = ("block_table", "tokens_per_page", "bytes_per_block")
    found = bool(allocators) and hasattr(cache, "use_prefix_sharing")
    if not (found and all(hasattr(each, name) for each in allocators.values() for name in told)):
        raise _unfit(transformers.__version__)


def _unfit(version: str) -> ConfigurationError:
    return ConfigurationError(
        f"transformers {version} has no hook for sampling in its continuous batching; "
        "install 'transformers>=5.19,<5.24'"
    )


def _takes(method: Callable[..., Any], *names: str) -> bool:
    return list(inspect.signature(method).parameters) == ["self", *names]
