"""The loop that every client runs: reasoning, text beside a call, parallel calls, results, and a second user message.

The model is `planned`: the user's messages hold the plan of the answers that follow them. This module uses only the
standard library, because clients run in an environment without the server's packages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

MARK = "PLAN:"
MAIN_TASK, SUB_TASK = "PARENT-TASK", "SUBAGENT-TASK"
"""What stands in front of a plan; `planned` has its format."""
RESULT = "21 degrees and sunny in"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name of the city."},
        "unit": {"type": "string", "description": "celsius or fahrenheit."},
    },
    "required": ["city"],
}
"""The parameters of `get_weather` for clients that take a schema."""


def get_weather(city: str, unit: str | None = None) -> str:
    """The weather in a city.

    Args:
        city: Name of the city.
        unit: celsius or fahrenheit.
    """
    return f"{RESULT} {city}"


def call(city: str, **more: str) -> dict[str, Any]:
    """Return a call of `get_weather` for a step."""
    return {"name": "get_weather", "arguments": {"city": city, **more}}


def message(text: str, steps: Sequence[dict[str, Any]]) -> str:
    """Return a user's message with a plan."""
    return f"{text} {MARK} {json.dumps(list(steps))}"


FIRST_CALLS = (
    {"think": "The user names\n\n  a city.", "say": "Let me look at Paris.", "calls": [call("Paris")]},
    {"think": "Two more.", "say": "Now two at once:", "calls": [call("Oslo"), call("Rome", unit="celsius")]},
)
SECOND_CALLS = (
    {"calls": [call("Lima")]},
    {"think": "Once more.", "say": "One last look.", "calls": [call("Cairo")]},
)
WORDLESS_CALLS = ({"think": "No words.", "calls": [call("Atlantis")]}, {"calls": [call("Kyiv")]})
FIRST = message("Follow this.", [*FIRST_CALLS, {"think": "Now I know.", "say": "I found: {results}"}])
FIRST_ANSWER = "I found: " + " ".join(get_weather(city) for city in ("Paris", "Oslo", "Rome"))
WORDLESS = message("Now that.", [*WORDLESS_CALLS, {"say": "That is all."}])
"""Calls with reasoning and no text, then with neither. There is no Atlantis: tools may raise."""
WORDLESS_ANSWER = "That is all."
SECOND = message("Now this.", [*SECOND_CALLS, {"think": "That is all.", "say": "At last: {results}"}])
SECOND_ANSWER = "At last: " + " ".join(get_weather(city) for city in ("Lima", "Cairo"))
CALLS = (FIRST_CALLS, WORDLESS_CALLS, SECOND_CALLS)
MESSAGES = (FIRST, WORDLESS, SECOND)
ANSWERS = (FIRST_ANSWER, WORDLESS_ANSWER, SECOND_ANSWER)
TURNS = 9
