"""The limit of concurrent steps of environments of one kind: `max_env_step_concurrent` of a custom environment."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_lock = threading.Lock()
_limits: dict[tuple[str, int], threading.BoundedSemaphore] = {}


def env_step_limit(env_config: Any, mode: str = "train") -> AbstractContextManager[Any]:
    """A context manager for `env.reset` and `env.step`, shared by all environments of a tag and mode in this process.

    Without `max_env_step_concurrent`, or with 0, it does nothing.
    """
    most = int(env_config.get("max_env_step_concurrent") or 0)
    if most <= 0:
        return nullcontext()
    name = f"{env_config.get('tag', 'default')}_{mode}"
    with _lock:
        return _limits.setdefault((name, most), threading.BoundedSemaphore(most))
