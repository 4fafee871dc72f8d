"""SGLang's scheduler process, where a token that is being sampled while weights change keeps the old version.

SGLang notes how many tokens each request has when its weights change. Its overlapped scheduler has by then launched
one step whose tokens it has not counted yet: the old weights sampled them, and it would name the new ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MARK = "tokengrove_sampled_by"


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """In place of SGLang's `run_scheduler_process`, in its child process."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if hasattr(Scheduler, "record_weight_version_change"):  # an older SGLang knows no versions within a reply
        HookRegistry.register(f"{_SCHEDULER}.record_weight_version_change", mark_launched, HookType.AROUND)
        HookRegistry.register(f"{_SCHEDULER}.process_batch_result", count_launched, HookType.AROUND)
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

    A request may end with this result, and tell its versions before `process` returns: until then all of it counts.
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
