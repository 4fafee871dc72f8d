"""Truncation of long tool responses, with verl's marks at the cut."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokengrove.errors import InvalidRequest

_OF_SIDE = {"left": "head", "right": "tail"}
_KEPT = ("head", "tail", "ends")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cuts texts to `length` characters (None: never) and a mark. `keep`: the `head`, the `tail` or both `ends`."""

    length: int | None
    keep: str

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Truncation:
        """Read `max_tool_response_length`, and `keep` or `tool_response_truncate_side`, of verl's `multi_turn`.

        The side is read as in verl's documentation: `left` keeps the beginning, `right` the end, anything else both
        ends. Newer releases of verl have left and right reversed, so both cause a warning. Raises InvalidRequest if
        `keep` is unknown or contradicts the side, and for a length that is not a positive integer.
        """
        length, keep, side = (
            settings.get(name) for name in ("max_tool_response_length", "keep", "tool_response_truncate_side")
        )
        if length is not None and (not isinstance(length, int) or length < 1):
            message = f"'max_tool_response_length' must be a positive number of characters, not {length!r}"
            raise InvalidRequest(message, param="max_tool_response_length")
        if keep is not None and keep not in _KEPT:
            raise InvalidRequest(f"'keep' must be one of {', '.join(_KEPT)}, not {keep!r}", param="keep")
        if side is None:
            return cls(length, keep or "ends")
        meant = _OF_SIDE.get(side, "ends")
        if keep is not None and keep != meant:
            raise InvalidRequest(
                f"'keep' is {keep!r}, but 'tool_response_truncate_side' {side!r} keeps the {meant}: give 'keep' alone, "
                "with the side null",
                param="keep",
            )
        if side not in (*_OF_SIDE, "middle"):
            warnings.warn(
                f"tool_response_truncate_side={side!r} keeps both ends, like every value but left and right in verl",
                stacklevel=2,
            )
        if keep is None and side in _OF_SIDE:
            warnings.warn(
                f"tool_response_truncate_side={side} keeps the {meant} of a tool response, as verl's documentation "
                f"prints it; newer releases of verl keep the other part. Write keep={meant} to be explicit",
                stacklevel=2,
            )
        return cls(length, meant)

    def cut(self, text: str) -> str:
        """The text, truncated if it is too long."""
        if self.length is None or len(text) <= self.length:
            return text
        if self.keep == "head":
            return text[: self.length] + "...(truncated)"
        if self.keep == "tail":
            return "(truncated)..." + text[-self.length :]
        half = self.length // 2
        return text[:half] + "...(truncated)..." + text[len(text) - half :]
