"""SGLang's scheduler process, where each token is passed on with the version that sampled it, from the first part on.

By itself SGLang names versions for certain in a reply's last part only, and counts the tokens of each request when
weights change: its overlapped scheduler has by then launched one step whose tokens it has not counted yet. The old
weights sampled them, and it would name the new ones. Hooks of its own registry put both right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_MARK = "tokengrove_sampled_by"


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """In place of SGLang's `run_scheduler_process`, in its child process."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    parts = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
    if hasattr(Scheduler, "record_weight_version_change"):  # an older SGLang knows no versions within a reply
        HookRegistry.register(f"{scheduler}.record_weight_version_change", mark_launched, HookType.AROUND)
        HookRegistry.register(f"{scheduler}.process_batch_result", count_launched, HookType.AROUND)
        HookRegistry.register(f"{parts}.to_payload", name_versions, HookType.AROUND)
    run_scheduler_process(*arguments, **named)


def mark_launched(record: Callable[..., Any], scheduler: Any, new_version: str | None) -> None:
    """Note on each batch whose result is still out which weights it was launched with."""
    from sglang.srt.runtime_context import get_serving

    old = get_serving().weight_version
    record(scheduler, new_version)
    if get_serving().weight_version != old:
        for batch, _ in getattr(scheduler, "result_queue", ()):
            if not hasattr(batch, _MARK):
                setattr(batch, _MARK, old)


def count_launched(process: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> None:
    """Count what this result adds to the requests of a noted batch as sampled by the weights noted.

    A request tells its versions before `process` returns: until then all of it counts.
    """
    version = getattr(batch, _MARK, None)
    requests = batch.reqs if version is not None else ()
    for request in requests:
        _end_version(request, version, len(request.output_ids), sys.maxsize)
    process(scheduler, batch, result)
    for request in requests:
        _end_version(request, version, sys.maxsize, len(request.output_ids))


def _end_version(request: Any, version: Any, before: int, end: int) -> None:
    """Let `version` end after `end` tokens, in place of what was noted at `before` tokens and later."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    events = [event for event in request.weight_version_events if event.num_output_tokens < before]
    request.weight_version_events = [*events, WeightVersionEvent(version, end)] if end else events


def name_versions(pack: Callable[..., Any], parts: Any, *arguments: Any, **named: Any) -> Any:
    """Let every part tell its versions as the last one does, before it waits on its way to the client."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    for place, (request, spans) in enumerate(zip(parts.output_reqs, parts.weight_versions, strict=True)):
        if spans is None:
            parts.weight_versions[place] = compute_weight_version_spans(
                request.weight_version_events, parts.current_weight_version, len(request.output_ids_through_stop)
            )
    return pack(parts, *arguments, **named)
