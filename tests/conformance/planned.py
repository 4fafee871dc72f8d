"""A model that follows a plan in its prompt: a JSON list of steps after `PLAN:`.

A step is `{"think"?: text, "say"?: text, "calls"?: [{"name", "arguments"}]}`; the step for a request is the number of
answers since the plan. `{results}` in a text stands for the tool results so far. Without a plan, or without tools (as
in calls for a title) it is a short text; a plan whose first step has `"bare": true` needs no tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from proxy.engine.arguments import parse_arguments
from proxy.engine.create import model_folder
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply, Script
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from proxy.types import Message, Role, TurnRequest, ids_of
from tests.conformance.loop import MARK


class PlannedEngine(ScriptedEngine):
    """For `serve --engine tests.conformance.planned:PlannedEngine [--engine-arg chunk=N]`."""

    def __init__(self, settings: Settings) -> None:
        renderer = load_renderer(settings, model_folder(settings))
        chunk = int(parse_arguments(settings.engine_arg).get("chunk", 3))
        super().__init__(follow(renderer, chunk), vocab_size=renderer.vocab_size, context_length=200_000)
        self.keep_requests = False


def follow(renderer: Renderer, chunk: int = 3) -> Script:
    """Make a script that follows the plan of each request; `chunk`: tokens a chunk."""
    end = ids_of(renderer.stop_token_ids[:1])

    def script(request: GenerateRequest) -> Reply:
        assert request.turn is not None
        return Reply(renderer.encode(step_text(request.turn)) + end, chunk=chunk)

    return script


def step_text(turn: TurnRequest) -> str:
    """Return the output of the model in this turn."""
    begun = [index for index, message in enumerate(turn.messages) if _plan(message)]
    since = turn.messages[begun[-1] :] if begun else ()
    steps = _plan(since[0]) if since else []
    if not steps or not (turn.tools or steps[0].get("bare")):
        return "A short text"
    done = _done(steps[0], since)
    return _text(steps[min(done, len(steps) - 1)], since)


def _plan(message: Message) -> list[Any]:
    if message.role is not Role.USER or MARK not in message.content:
        return []
    text = message.content.partition(MARK)[2].strip()
    steps: list[Any] = json.JSONDecoder().raw_decode(text)[0]
    return steps


def _done(first: dict[str, Any], since: Sequence[Message]) -> int:
    """How many steps have been taken."""
    if "counted" not in first:
        return sum(message.role is Role.ASSISTANT for message in since)
    return since[0].content.splitlines().count(first["counted"])


def _text(step: dict[str, Any], messages: Sequence[Message]) -> str:
    thought = f"<think>\n{step['think']}\n</think>\n\n" if "think" in step else ""
    results = " ".join(message.content for message in messages if message.role is Role.TOOL)
    calls = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in step.get("calls", ())]
    return thought + "\n".join([*filter(None, [step.get("say", "").replace("{results}", results)]), *calls])
