"""A `ModelStep` of openenv's white-box harnesses (`MCPHarnessAdapter`), sampled in the session of a rollout.

The returned ids are those of the session; nothing is tokenized here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokengrove.client.libraries import library
from tokengrove.openenv.react import tool_json
from tokengrove.openenv.server_generate import ServerGenerate


class SessionModelStep:
    """Samples the turns of one rollout, in order. `rollout_id`: as in `ServerGenerate.generate`."""

    def __init__(self, generate: ServerGenerate, rollout_id: str) -> None:
        self._generate, self._rollout_id = generate, rollout_id
        self._turns = itertools.count()

    def __call__(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], sampling: Mapping[str, Any]) -> Any:
        """openenv's `ModelStepResult`. Raises InvalidRequest if openenv is not installed."""
        harness, models = library("openenv.core.harness"), library("openenv.core.llm_client")
        turn = next(self._turns)
        text = self._generate.generate(
            self._rollout_id, turn, messages, [tool_json(tool) for tool in tools], dict(sampling)
        )
        told = self._generate.tokens(self._rollout_id, turn)
        calls = [
            models.ToolCall(
                id=call["id"], name=call["function"]["name"], args=_arguments(call["function"]["arguments"])
            )
            for call in text.message.get("tool_calls", ())
        ]
        return harness.ModelStepResult(
            response=models.LLMResponse(content=text.message.get("content") or "", tool_calls=calls),
            prompt_ids=told.prompt_ids,
            completion_ids=told.token_ids,
            logprobs=list(told.logprobs or ()),
        )


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; {} for invalid arguments, since openenv cannot represent a text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
