"""verl's loop of answers and tool calls has the ids of the exported sample with every published template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from proxy.engine.scripted.scripts import Reply, play
from proxy.rendering import Renderer, load_renderer
from proxy.rendering.written_answers import write_answer
from proxy.settings import Settings
from proxy.types import Message, Role, Tool, ToolCall
from tests.support import function_tool, serving, user
from tests.unit.proxy.rendering.rendering_folders import FAMILIES
from tests.wide import CROSSED
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest
from tokengrove.verl import AsyncLLMServerManager, ToolAgentLoop, ToolParser
from tokengrove.verl.tools.function_tools import FunctionTool
from tokengrove.verl.tools.schemas import OpenAIFunctionToolSchema

READ = function_tool("read", {"path": {"type": "string"}})
TOOL = Tool("read", "", {"type": "object", "properties": {"path": {"type": "string"}}})
SETTINGS = {"max_parallel_calls": 2, "format": None}  # None: the parser of the server's model


def reading(path: str) -> str:
    return f"the text of {path}"


def written(renderer: Renderer, answer: Message) -> Reply:
    return Reply(write_answer(renderer, (Message(Role.USER, "Hi"),), answer, (TOOL,), {}))


@CROSSED
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_loop_has_the_ids_of_the_exported_sample(
    published: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, calls: int
) -> None:
    monkeypatch.setattr(ToolParser, "_registry", {})
    renderer = load_renderer(Settings(), published(name))
    asked = tuple(ToolCall(f"call{n:05}", "read", f'{{"path": "{n}"}}') for n in range(calls))
    try:
        call = written(renderer, Message(Role.ASSISTANT, "", asked))
    except InvalidRequest:
        pytest.skip("the template writes no such calls")
    script = play([call, call, written(renderer, Message(Role.ASSISTANT, "Done."))])
    config = {
        "actor_rollout_ref": {"rollout": {"prompt_length": 9999, "response_length": 9999, "multi_turn": SETTINGS}}
    }
    tool = FunctionTool("read", reading, OpenAIFunctionToolSchema.model_validate(READ))
    async with (
        serving(tmp_path, script, renderer) as server,
        AsyncClient(app=server.app) as client,
        client.session("task") as session,
    ):
        loop = ToolAgentLoop(config, AsyncLLMServerManager(config, session), None, tools=[tool])
        output = await loop.run([user("Hi")], {})
        [sample] = (await client.export(session_id=session.session_id)).samples
    assert (output.stop_reason, output.num_turns) == ("no_tool_call", 6)
    assert output.extra_fields["tool_rewards"] == [0.0] * 2 * calls
    ids = [*output.prompt_ids, *output.response_ids]
    assert ids == sample.input_ids.tolist()
    assert [0] * len(output.prompt_ids) + output.response_mask == sample.loss_mask.tolist()
    assert renderer.decode(np.asarray(ids, np.int32)).count("the text of") == 2 * calls  # type: ignore[arg-type]
