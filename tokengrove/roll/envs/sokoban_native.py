"""Sokoban as a conversation that the environment writes: ROLL's `sokoban_native_env`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from tokengrove.roll.envs.actions import METRICS_AGG_MODE, text_of
from tokengrove.roll.envs.sokoban import SokobanEnv

Messages = list[dict[str, Any]]
"""A conversation in the format of chat completions."""

_SYSTEM = "You are a helpful assistant and a good player. Aim for a high reward."


class SokobanNativeEnv(SokobanEnv):
    """Sokoban whose observations are all messages so far, and whose actions are the assistant's texts.

    `system_template`: the text of the system message before the rules. `observation_suffix`: the text after each map.
    Instead of an action a manager may pass the reason that ends the episode (a member of an enumeration). Other
    parameters are those of `SokobanEnv`, with smaller rooms by default.
    """

    render_modes = ("text",)
    reminder = "Keep to the form."
    """The text for the model after a message without an action."""

    def __init__(
        self,
        system_template: str | None = None,
        observation_suffix: str | None = None,
        debug: bool = False,
        max_steps: int = 10,
        format_penalty: float = -0.1,
        **parameters: Any,
    ) -> None:
        parameters = {"dim_room": (6, 6), "num_boxes": 1, **parameters}
        super().__init__(max_steps=max_steps, format_penalty=format_penalty, **parameters)
        self.system_template = _SYSTEM if system_template is None else system_template
        names = ", ".join(self.ACTION_LOOKUP.values())
        asked = f"Answer with one of {names} in the form <answer>Right</answer>, and nothing else."
        self.observation_suffix = asked if observation_suffix is None else observation_suffix
        self.debug, self.current_step, self.task_idx, self.reward = debug, 0, 0, 0.0
        self.failure_mode = self.stop_reason = ""
        self.message_history: Messages = []

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the game of `seed`: its system message and its first map. `info["tools"]` is empty."""
        observation, info = super().reset(seed)
        self.task_idx, self.current_step, self.reward = self.task_idx + 1, 0, 0.0
        self.failure_mode = self.stop_reason = ""
        system = f"{self.system_template}\n\n{info['env_instruction']}"
        self.message_history = [
            {"role": "system", "content": system},
            {"role": "user", "content": self._shown(observation)},
        ]
        return self._messages(), {**info, "tools": [], "error_msg": "", "failure_mode": ""}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Add the assistant's message and its result."""
        if isinstance(action, Enum):
            return self._stopped(action)
        self.current_step += 1
        self.message_history.append({"role": "assistant", "content": text_of(action)})
        observation, reward, terminated, truncated, info = super().step(action)
        self.reward = reward
        hint = "" if info["metrics"]["action_is_valid"] else f"{info['action_desc']} {self.reminder}\n\n"
        self.message_history.append({"role": "user", "content": hint + self._shown(observation)})
        return self._messages(), reward, terminated, truncated, self._told(info)

    def _stopped(self, reason: Enum) -> tuple[Messages, float, bool, bool, dict[str, Any]]:
        """The end that a manager requests: nothing is played, and the reward is 0."""
        self.stop_reason = reason.name
        metrics = {"success": self.boxes_on_target == self.num_boxes}
        info = {"metrics": metrics, "metrics_agg_mode": dict(METRICS_AGG_MODE)}
        return self._messages(), 0.0, True, True, self._told(info)

    def _shown(self, observation: str) -> str:
        return f"The map is:\n{observation}\n\n{self.observation_suffix}".rstrip()

    def _messages(self) -> Messages:
        """The conversation, as a copy that later steps do not change."""
        return list(self.message_history)

    def _told(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """`info` with the fields that managers expect of an environment that owns its messages."""
        more = {"env_timeout": False, "env_reset_failed": False, "raw_reward": self.reward, "task_id": self.task_idx}
        return {
            **info,
            "metrics": {**info["metrics"], **more},
            "failure_mode": self.failure_mode,
            "error_messages": [],
            "stop_reason": self.stop_reason,
            "test_output": "",
        }
