"""An environment that draws from the random generators of its process, alone with a state of its own.

The games of gem seed and use the generators of `random` and `numpy`, which all threads share. With this, an episode
depends on its seed and its actions, whatever other such environments draw meanwhile, and the generators of the program
are left as they were. A thread that is none of theirs and draws at that very moment still changes the episode.
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

    Everything else of it is the environment's own: attributes are read and set there.
    """

    def __init__(self, env: Any, *, steps: bool) -> None:
        vars(self).update(env=env, _steps=steps, _state=None)

    def __getattr__(self, name: str) -> Any:
        if name in ("env", "_steps", "_state"):  # a copy that is being made has none yet
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
