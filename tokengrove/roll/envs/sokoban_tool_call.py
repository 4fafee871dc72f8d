"""Sokoban with tool calls: ROLL's `sokoban_tool_call`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from tokengrove.roll.envs.actions import METRICS_AGG_MODE, text_of
from tokengrove.roll.envs.sokoban_native import SokobanNativeEnv

logger = logging.getLogger(__name__)

_RULES = (
    "You play Sokoban. You are the player, and all boxes have to be pushed onto targets. You push a box by moving "
    "towards it from the cell beside it; boxes cannot be pulled, nor pushed into walls or other boxes. Call the tool "
    "move_player for each move, and write no actions as text."
)
_TOOL = "move_player"
_NUMBERS = {"up": 1, "down": 2, "left": 3, "right": 4}


class SokobanToolCallEnv(SokobanNativeEnv):
    """Sokoban whose actions are assistant messages with calls of `move_player`; texts are not actions.

    The calls of a message are made in order. An invalid call (another tool, invalid arguments, an unknown direction) is
    answered with an error, and its message earns `format_penalty`. With `full_history`, a message with an invalid call
    and its answers are removed from the history, and a user message gives the reason; so the next request is a fork.
    Other parameters are those of `SokobanNativeEnv`; `max_steps` counts messages. The reward of a message is the sum of
    its moves' rewards.
    """

    reminder = f"Call the tool {_TOOL}."

    def __init__(self, full_history: bool = False, **parameters: Any) -> None:
        super().__init__(**{"env_instruction": _RULES, "observation_suffix": "", **parameters})
        self.full_history = full_history

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tool in the format of chat completions."""
        direction = {"type": "string", "enum": [*_NUMBERS], "description": "Where to move"}
        function = {
            "name": _TOOL,
            "description": "Move the player by one cell; a box that is in the way is pushed.",
            "parameters": {"type": "object", "properties": {"direction": direction}, "required": ["direction"]},
        }
        return [{"type": "function", "function": function}]

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the game of `seed`: its system message and its first map. `info["tools"]` has the tool."""
        messages, info = super().reset(seed)
        return messages, {**info, "tools": self.tools}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make the calls of a message, and add the message and the answers to the conversation."""
        self.num_env_steps = self.current_step  # each message is one step, even if nothing was played
        calls = (action.get("tool_calls") or []) if isinstance(action, Mapping) else []
        if not calls:
            return super().step(text_of(action) if isinstance(action, Mapping) else action)
        self.current_step += 1
        answered: list[dict[str, Any]] = [{"role": "assistant", **action}]
        earned, over, wrong, told = 0.0, False, 0, _nothing_done()
        for call in calls:
            number, problem = (None, "the game is over") if over else _number_of(call)
            if number is None:
                wrong += not over
                answered.append(_answer(call, f"Error: {problem}.", self.render()))
                continue
            self.num_env_steps = self.current_step - 1
            chosen = {"action": number, "action_content": _name(number), "think_content": ""}
            observation, reward, over, _, told = self.play(chosen)
            earned += reward
            answered.append(_answer(call, told["action_desc"], observation))
        self.reward = earned + (self.format_penalty if wrong else 0.0)
        self._add(answered, wrong > 0)
        metrics = {**told["metrics"], "action_is_valid": not wrong, "success": self.boxes_on_target == self.num_boxes}
        metrics["format_penalty"] = self.format_penalty if wrong else 0.0
        over = over or self.current_step >= self.max_steps
        info = self._told({**told, "metrics": metrics})
        return self._messages(), self.reward, over, over and not metrics["success"], info

    def parse_action(self, text: str) -> dict[str, Any]:
        """No action: texts are not actions here."""
        return {"action": None, "action_content": text[:50], "think_content": ""}

    def _add(self, answered: list[dict[str, Any]], wrong: bool) -> None:
        if not (wrong and self.full_history):
            self.message_history += answered
            return
        logger.info("step %d of sokoban_tool_call is removed from the history: a call was invalid", self.current_step)
        problem = (
            f"Your last call was wrong, and the round was removed: {_TOOL} takes a direction, one of "
            f"{', '.join(_NUMBERS)}.\n\n{self._shown(self.render())}"
        )
        self.message_history.append({"role": "user", "content": problem})


def _number_of(call: Any) -> tuple[int | None, str]:
    """The direction of a call as a number, or None with the error."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or function.get("name") != _TOOL:
        return None, f"there is no such tool; call {_TOOL}"
    arguments = function.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None, "the arguments are no JSON"
    direction = arguments.get("direction") if isinstance(arguments, Mapping) else None
    if not isinstance(direction, str) or direction.strip().lower() not in _NUMBERS:
        return None, f"the direction must be one of {', '.join(_NUMBERS)}"
    return _NUMBERS[direction.strip().lower()], ""


def _answer(call: Any, said: str, observation: str) -> dict[str, Any]:
    name = call.get("id") if isinstance(call, Mapping) else None
    return {"role": "tool", "tool_call_id": name or "unknown", "content": f"{said}\n\nThe map is:\n{observation}"}


def _name(number: int) -> str:
    return next(name for name, each in _NUMBERS.items() if each == number)


def _nothing_done() -> dict[str, Any]:
    metrics = {"action_is_effective": False, "action_is_valid": False, "success": False, "format_penalty": 0.0}
    told = {"metrics": metrics, "metrics_agg_mode": dict(METRICS_AGG_MODE), "action_desc": "No call could be made."}
    return {**told, "action": None, "action_content": "", "think_content": ""}
