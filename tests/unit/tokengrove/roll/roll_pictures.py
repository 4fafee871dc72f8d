"""Environments whose observations are pictures, for tests of VLTrajEnvManager."""

from __future__ import annotations

from typing import Any

import numpy as np
from gem import Env


class Pictures(Env):
    """Shows `length` pictures, one a step, in one of ROLL's forms: `array`, `dict`, `parts`, `messages` or `text`."""

    image_placeholder = "<image>"

    def __init__(self, form: str = "array", length: int = 2, **others: Any) -> None:
        self.form, self.length, self.others = form, length, others
        self.actions: list[Any] = []

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.seed, self.at = seed or 0, 0
        return self.observation(), {"env_instruction": "Look at it. "}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.at += 1
        return self.observation(), 1.0, self.at == self.length, False, {}

    def picture(self) -> Any:
        """The picture of this step: no two are equal."""
        array = np.full((48, 64, 3), 10 * self.at, np.uint8)
        array[: 10 + self.at, :, 0] = self.seed % 256
        return array

    def observation(self) -> Any:
        picture = self.picture()
        parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        return {
            "array": picture,
            "text": "There is nothing to see.",
            "dict": {"prompt": "Here: <image> and <image>.", "image": [picture, picture]},
            "parts": {"prompt": parts, "image": picture},
            "messages": {
                "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
                "image": [picture],
            },
            "missing": {"prompt": "Here it is.", "image": [picture]},
            "video": {"prompt": "Here it is.", "video": [picture]},
        }[self.form]

    def sample_random_action(self) -> str:
        return "<answer>1</answer>"
