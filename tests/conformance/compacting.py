"""A model for agents whose context fills up: one plan for the main agent, which goes on over compactions, one for
sub-agents, and an answer for each request for a summary.

The plan is a JSON file: `{"main": [step], "sub": [step], "summary": text}`, with steps as in `planned`. `{n}` in the
summary is its number, and `{agent_id}` in a step is the id that the last tool result names. A sub-agent is known by
its task.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from proxy.engine.arguments import parse_arguments
from proxy.engine.create import model_folder
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply
from proxy.rendering.renderer import load_renderer
from proxy.settings import Settings
from proxy.trajectory.purpose import purpose_of_prompt
from proxy.types import Role, TurnRequest, ids_of
from tests.conformance.loop import MAIN_TASK, SUB_TASK


class CompactingEngine(ScriptedEngine):
    """For `serve --engine tests.conformance.compacting:CompactingEngine --engine-arg plan=FILE`."""

    def __init__(self, settings: Settings) -> None:
        renderer = load_renderer(settings, model_folder(settings))
        plan = Plan(json.loads(Path(str(parse_arguments(settings.engine_arg)["plan"])).read_text()))
        end = ids_of(renderer.stop_token_ids[:1])

        def script(request: GenerateRequest) -> Reply:
            assert request.turn is not None
            return Reply(renderer.encode(plan.text(request.turn)) + end, chunk=200)

        super().__init__(script, vocab_size=renderer.vocab_size, context_length=1_000_000)
        self.keep_requests = False


class Plan:
    """What the model says next."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._done = {"main": itertools.count(), "sub": itertools.count(), "summary": itertools.count(1)}

    def text(self, turn: TurnRequest) -> str:
        """The answer to a request, which counts as a step of its plan."""
        if "summary" in (turn.purpose, purpose_of_prompt(turn.messages)):
            summary: str = self._plan["summary"]
            return summary.replace("{n}", str(next(self._done["summary"])))
        if not turn.tools:
            return "A short text"
        asked = " ".join(message.content for message in turn.messages if message.role is Role.USER)
        whose = "sub" if SUB_TASK in asked and MAIN_TASK not in asked else "main"
        steps = self._plan[whose]
        step = steps[min(next(self._done[whose]), len(steps) - 1)]
        results = " ".join(message.content for message in turn.messages if message.role is Role.TOOL)
        named = re.findall(r'"agent_id":\s*"([^"]+)"', results)
        calls = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in step.get("calls", ())]
        return "\n".join([step["say"], *calls]).replace("{agent_id}", named[-1] if named else "none")
