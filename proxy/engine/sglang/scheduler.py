"""SGLang's scheduler process with hooks that report the exact weight version of every token, from the first part on.

Without the hooks, SGLang reports exact versions only in a reply's last part. Also, when weights change, it counts the
tokens of each request, but its overlapped scheduler has already launched a step with tokens that are not counted: the
old weights sample them, and SGLang would report the new version. The hooks, registered in SGLang's own hook registry,
correct both.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

_MARK = "tokengrove_sampled_by"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"


def run_scheduler(*arguments: Any, never_sampled: Sequence[int] = (), **named: Any) -> None:
    """Register the hooks, then run SGLang's `run_scheduler_process`. This function replaces it in the child process.

    `never_sampled`: ids of tokens that are never sampled.
    """
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    parts = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
    if hasattr(Scheduler, "record_weight_version_change"):  # older SGLang has no versions within a reply
        HookRegistry.register(f"{scheduler}.record_weight_version_change", mark_launched, HookType.AROUND)
        HookRegistry.register(f"{scheduler}.process_batch_result", count_launched, HookType.AROUND)
        HookRegistry.register(f"{parts}.to_payload", name_versions, HookType.AROUND)
    if never_sampled:
        from sglang.srt.layers.sampler import Sampler

        whole = "logprob_logits" in inspect.signature(Sampler.forward).parameters
        HookRegistry.register(f"{_SAMPLER}.forward", never(never_sampled, whole=whole), HookType.AROUND)
        HookRegistry.register(f"{scheduler}.record_weight_version_change", forget_images, HookType.AROUND)
    run_scheduler_process(*arguments, **named)


def never(tokens: Sequence[int], *, whole: bool) -> Callable[..., Any]:
    """Return a hook that prevents tokens from being sampled.

    `whole`: logprobs are those of the whole distribution. In older SGLang they are those of the remaining tokens.
    """

    def sample(forward: Callable[..., Any], sampler: Any, output: Any, *arguments: Any, **named: Any) -> Any:
        logits = output.next_token_logits
        if whole and named.get("logprob_logits") is None:
            named["logprob_logits"] = logits.clone()
        logits[:, list(tokens)] = float("-inf")
        return forward(sampler, output, *arguments, **named)

    return sample


def forget_images(record: Callable[..., Any], scheduler: Any, *arguments: Any, **named: Any) -> None:
    """Hook: when weights have changed, drop the cached features of images, which SGLang keys by the image alone."""
    from sglang.srt.managers import mm_schedule

    record(scheduler, *arguments, **named)
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def mark_launched(record: Callable[..., Any], scheduler: Any, new_version: str | None) -> None:
    """Hook: mark each batch that has a pending result with the weight version that it was launched with."""
    from sglang.srt.runtime_context import get_serving

    old = get_serving().weight_version
    record(scheduler, new_version)
    if get_serving().weight_version != old:
        for batch, _ in getattr(scheduler, "result_queue", ()):
            if not hasattr(batch, _MARK):
                setattr(batch, _MARK, old)


def count_launched(process: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
    """Hook: attribute the tokens of a marked batch's result to the version in the mark.

    A request may report its versions before `process` returns, when the number of its new tokens is still unknown.
    Until then the old version has no end.
    """
    version = getattr(batch, _MARK, None)
    requests = batch.reqs if version is not None else ()
    for request in requests:
        _end_version(request, version, len(request.output_ids), sys.maxsize)
    process(scheduler, batch, result)
    for request in requests:
        _end_version(request, version, sys.maxsize, len(request.output_ids))


def _end_version(request: Any, version: Any, before: int, end: int) -> None:
    """Record that `version` ends after `end` tokens, replacing events at `before` tokens or later."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    events = [event for event in request.weight_version_events if event.num_output_tokens < before]
    request.weight_version_events = [*events, WeightVersionEvent(version, end)] if end else events


def name_versions(pack: Callable[..., Any], parts: Any, *arguments: Any, **named: Any) -> Any:
    """Hook: add the version spans of all tokens to every part. SGLang adds them only to the last part."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    for place, (request, spans) in enumerate(zip(parts.output_reqs, parts.weight_versions, strict=True)):
        if spans is None:
            parts.weight_versions[place] = compute_weight_version_spans(
                request.weight_version_events, parts.current_weight_version, len(request.output_ids_through_stop)
            )
    return pack(parts, *arguments, **named)
