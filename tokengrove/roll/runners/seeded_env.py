"""A wrapper for environments that use the random generators of the process: it gives each its own state.

The games of gem seed and use the generators of `random` and `numpy`, which all threads share. With this wrapper an
episode depends only on its seed and its actions, even if other wrapped environments use the generators, and the
generators of the program keep their state. Other threads that use the generators during a call still affect it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_alone = threading.Lock()


class SeededEnv:
    """`env`, whose `reset`, and with `steps` also its `step`, run one at a time in this process.

    All other attributes are read and set on the environment itself.
    """

    def __init__(self, env: Any, *, steps: bool) -> None:
        vars(self).update(env=env, _steps=steps, _state=None)

    def __getattr__(self, name: str) -> Any:
        if name in ("env", "_steps", "_state"):  # a copy in the making does not have them yet
            raise AttributeError(name)
        return getattr(self.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.env, name, value)

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def reset(self, seed: int | None = None, **options: Any) -> Any:
        with self._own_generators():
            return self.env.reset(seed=seed, **options)

    def step(self, action: Any) -> Any:
        if not self._steps:
            return self.env.step(action)
        with self._own_generators():
            return self.env.step(action)

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        with _alone:
            before = _state()
            if self._state is not None:
                _restore(self._state)
            try:
                yield
            finally:
                vars(self)["_state"] = _state()
                _restore(before)


def _state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _restore(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
