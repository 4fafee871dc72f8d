"""Environments for tests of direct managers: what to answer stands in the observation, so `play=agent` plays them."""

from __future__ import annotations

from typing import Any

from gem import Env


class Counting(Env):
    """Asks for the numbers from `seed` on, `length` of them; each right answer earns its step, from 1.

    `breaks`: the calls that raise, of `reset` and of each step. `seeds` has the seeds of all episodes.
    """

    def __init__(self, length: int = 3, breaks: tuple[str, ...] = (), text: str = "", **others: Any) -> None:
        self.length, self.breaks, self.text, self.others = length, tuple(breaks), text, others
        self.seeds: list[int | None] = []
        self.actions: list[Any] = []

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self._fail_at("reset")
        self.number, self.at = seed or 0, 0
        return self._observation(), {"env_instruction": "Count.", "suffix": "first"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self._fail_at(f"step {self.at}")
        is_right = f"<answer>{self.number}</answer>" in action
        self.at, self.number = self.at + 1, self.number + 1
        info = {
            "suffix": f"after {self.at}",
            "metrics": {"action_is_valid": is_right, "right": float(is_right)},
            "metrics_agg_mode": {"right": "sum"},
        }
        return self._observation(), float(self.at) if is_right else 0.0, self.at == self.length, False, info

    def sample_random_action(self) -> str:
        return f"<answer>{self.number}</answer>"

    def _observation(self) -> Any:
        return f"{self.text}Say exactly: <answer>{self.number}</answer>"

    def _fail_at(self, place: str) -> None:
        if place in self.breaks:
            raise RuntimeError(f"the game broke at {place}")


class Talking(Counting):
    """Counting, where the environment owns the messages. `rewrites`: it forgets its history at each step."""

    def __init__(self, rewrites: bool = False, tools: Any = (), failed: bool = False, **others: Any) -> None:
        super().__init__(**others)
        self.rewrites, self.tools, self.env_reset_failed = rewrites, tools, failed
        self.env_info = {"level": 3}

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        first, _ = super().reset(seed)
        self.messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": first}]
        return self.messages, {"tools": list(self.tools), "failure_mode": "no sandbox"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not isinstance(action, str):
            self.actions.append(action)
            return self.messages, 0.5, True, True, {"failure_mode": "too long"}
        observation, reward, terminated, truncated, info = super().step(action)
        if self.rewrites:
            del self.messages[1:]
        else:
            self.messages.append({"role": "assistant", "content": action})
        self.messages.append({"role": "user", "content": observation})
        return self.messages, reward, terminated, truncated, info


class Paid(Env):
    """Shows `observations` in turn, and gives the reward of `rewards` at the same place, whatever the action is.

    `as_messages`: the environment owns the conversation; with `forgets` each is the current observation alone.
    """

    def __init__(
        self,
        observations: list[str],
        rewards: list[float],
        as_messages: bool = False,
        forgets: bool = False,
        **others: Any,
    ) -> None:
        self.observations, self.rewards = list(observations), list(rewards)
        self.as_messages, self.forgets = as_messages, forgets

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.at = 0
        self.messages: list[dict[str, Any]] = []
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, self.at = self.rewards[self.at], self.at + 1
        self.messages = [] if self.forgets else [*self.messages, {"role": "assistant", "content": action}]
        return self._observation(), reward, self.at == len(self.rewards), False, {}

    def _observation(self) -> Any:
        text = f"Say exactly: {self.observations[min(self.at, len(self.observations) - 1)]}"
        if not self.as_messages:
            return text
        self.messages = [*self.messages, {"role": "user", "content": text}]
        return list(self.messages)
