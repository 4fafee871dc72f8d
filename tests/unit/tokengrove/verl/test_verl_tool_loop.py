"""`ToolAgentLoop` against a live server: its output is the exported sample, token by token, and each stop is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from proxy.engine.scripted.scripts import Reply, Script, play
from tests.support import Server, call_text, sampled, says, serving, tiny_renderer
from tokengrove.client import AsyncClient, AsyncSession, Sample
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.reasons import FinishReason
from tokengrove.verl import (
    AgentData,
    AgentLoopBase,
    AgentLoopOutput,
    AgentState,
    AsyncLLMServerManager,
    BaseTool,
    FunctionCall,
    TokenOutput,
    ToolAgentLoop,
    ToolParser,
    ToolResponse,
)
from tokengrove.verl.tool_parsers import server_of_loop

QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]
CALL = "I add." + call_text("add", '{"numbers": [1, 2]}')


class Add(BaseTool):
    """Adds numbers. `config` says what to do instead."""

    def __init__(self, **config: Any) -> None:
        schema = {
            "type": "function",
            "function": {
                "name": config.get("name", "add"),
                "description": "Add numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
                    "required": ["numbers"],
                },
            },
        }
        super().__init__(config, schema)
        self.created: list[dict[str, Any]] = []
        self.released: list[str] = []
        self.seen: list[AgentData] = []
        self.running = 0
        self.most = 0
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        self.created.append(kwargs)
        return f"instance-{len(self.created)}", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.seen.append(kwargs["agent_data"])
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        if self.config.get("hangs"):
            self.reached.set()
            await self.go_on.wait()
        self.running -= 1
        if self.config.get("fails"):
            raise RuntimeError("no adder here")
        answer = self.config.get("answer", str(sum(parameters["numbers"])))
        return answer, self.config.get("reward", 0.25), {"sums": 1, "unit": "m"}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(kwargs["worth"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released.append(instance_id)


class Manager(AsyncLLMServerManager):
    """Notes the parameters of each answer."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(None, session)
        self.asked: list[dict[str, Any]] = []

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        self.asked.append(dict(kwargs["sampling_params"]))
        return await super().generate(*args, **kwargs)


class Served:
    """A server of scripted replies, a session on it, and loops that run there."""

    def __init__(self, server: Server, client: AsyncClient, session: AsyncSession) -> None:
        self.server, self.client, self.session = server, client, session
        self.manager = Manager(session)

    def loop(self, *tools: Any, kind: type[ToolAgentLoop] = ToolAgentLoop, **settings: Any) -> ToolAgentLoop:
        sizes = {name: settings.pop(name) for name in ("prompt_length", "response_length") if name in settings}
        rollout = {"prompt_length": 400, "response_length": 400, **sizes, "multi_turn": settings}
        config = {"actor_rollout_ref": {"rollout": rollout}}
        return kind(config, self.manager, None, tools=list(tools))

    async def run(self, *tools: Any, sample: Mapping[str, Any] | None = None, **settings: Any) -> AgentLoopOutput:
        return await self.loop(*tools, **settings).run(QUESTION, {"temperature": 1.0}, **(sample or {}))

    async def exported(self) -> Sample:
        [sample] = (await self.client.export(session_id=self.session.session_id)).samples
        return sample

    def text(self, ids: Sequence[int]) -> str:
        return tiny_renderer().decode(np.asarray(ids, np.int32))  # type: ignore[arg-type]


@asynccontextmanager
async def served(folder: Path, script: Script, **settings: Any) -> AsyncIterator[Served]:
    async with (
        serving(folder, script, **settings) as server,
        AsyncClient(app=server.app) as client,
        client.session("task") as session,
    ):
        yield Served(server, client, session)


def is_the_sample(output: AgentLoopOutput, sample: Sample) -> None:
    """Assert that the output is what the export has of the session, token by token."""
    ids = [*output.prompt_ids, *output.response_ids]
    mask = [0] * len(output.prompt_ids) + output.response_mask
    logprobs = [0.0] * len(output.prompt_ids) + list(output.response_logprobs or ())
    assert ids == sample.input_ids.tolist()
    assert mask == sample.loss_mask.tolist()
    assert np.array_equal(np.asarray(logprobs, np.float32), sample.logprobs)


async def test_the_output_is_the_exported_sample_token_by_token(tmp_path: Path) -> None:
    tool = Add()
    async with served(tmp_path, says(CALL, "It is 3.")) as it:
        output = await it.run(tool)
        is_the_sample(output, await it.exported())
        assert (output.stop_reason, output.num_turns) == ("no_tool_call", 4)
        sections = it.text(output.response_ids)
        assert sections.startswith(CALL) and sections.endswith("It is 3.<|im_end|>")
        assert "<tool_response>\n3\n</tool_response>" in sections
        assert '"items"' in it.text(output.prompt_ids)
    assert tool.released == ["instance-1"]
    [data] = tool.seen
    assert [message["role"] for message in data.messages] == ["user", "assistant", "tool", "assistant"]
    assert data.messages[2]["tool_call_id"] == data.messages[1]["tool_calls"][0]["id"]


async def test_calls_of_one_turn_run_at_once_and_those_beyond_the_limit_stay_in_the_tokens(tmp_path: Path) -> None:
    tool = Add()
    calls = "".join(call_text("add", f'{{"numbers": [{number}]}}') for number in (7, 8, 9))
    async with served(tmp_path, says(calls, "Done.")) as it:
        output = await it.run(tool, max_parallel_calls=2)
        is_the_sample(output, await it.exported())
        text = it.text(output.response_ids)
    assert tool.most == 2
    assert tool.released == ["instance-1", "instance-2"]
    assert text.count("<tool_call>") == 3
    assert text.count("<tool_response>") == 2
    assert len(tool.seen[0].messages[1]["tool_calls"]) == 2


async def test_rewards_and_metrics_of_tools_are_told_by_turn(tmp_path: Path) -> None:
    two = call_text("add", '{"numbers": [1]}') * 2
    async with served(tmp_path, says(two, CALL, "Done.")) as it:
        output = await it.run(Add(), max_parallel_calls=2)
        turns = (await it.exported()).interaction_ids
        for name, rewards in output.named_rewards.items():
            for turn, reward in rewards.items():
                await it.session.set_reward(reward, interaction_id=turn, name=name)
        await it.session.set_reward(1.0)
        main = await it.exported()
        [named] = (await it.client.export(session_id=it.session.session_id, reward_name="tool")).samples
    assert output.extra_fields["tool_rewards"] == [0.25, 0.25, 0.25]
    assert output.extra_fields["turn_scores"] == []
    assert output.named_rewards == {"tool": {turns[0]: 0.5, turns[1]: 0.25}}
    told = output.metrics.model_dump()
    assert told["tool/add/calls"] == told["tool/add/sums"] == 3
    assert told["tool/add/unit"] == "m"
    assert told["tool_calls"] > 0 and told["generate_sequences"] > 0
    assert main.score == 1.0
    assert named.score == 0.5 + 0.25 + 1.0  # a turn without a reward of this name has its main one


async def test_the_sample_says_what_its_tools_are_given_and_which_it_has(tmp_path: Path) -> None:
    add, other = Add(), Add(name="other")
    sample = {
        "tools_kwargs": {"add": {"create_kwargs": {"truth": 3}, "calc_reward_kwargs": {"worth": 2}}},
        "extra_info": {"tool_selection": ["add", "unknown"]},
    }
    calls = CALL + call_text("other", '{"numbers": [1]}')
    async with served(tmp_path, says(calls, "Done.")) as it:
        output = await it.run(add, other, sample=sample, max_parallel_calls=2)
        text = it.text([*output.prompt_ids, *output.response_ids])
    assert add.created == [{"truth": 3, "create_kwargs": {"truth": 3}}]
    assert '"name": "other", "description"' not in text
    assert "Unknown function 'other'. Available tools: ['add']" in text
    assert other.created == []
    assert output.reward_score == 2.0
    assert output.extra_fields["reward_scores"] == {"add": 2.0}


@pytest.mark.parametrize(
    ("replies", "settings", "reason", "num_turns"),
    [
        (["Three."], {}, "no_tool_call", 2),
        ([CALL], {"max_assistant_turns": 1}, "max_assistant_turns", 2),
        ([CALL, CALL], {"max_user_turns": 1}, "max_user_turns", 4),
    ],
)
async def test_each_stop_is_told(
    tmp_path: Path, replies: list[str], settings: dict[str, Any], reason: str, num_turns: int
) -> None:
    async with served(tmp_path, says(*replies)) as it:
        output = await it.run(Add(), **settings)
        is_the_sample(output, await it.exported())
    assert (output.stop_reason, output.num_turns) == (reason, num_turns)


async def test_no_answer_is_longer_than_what_is_left_of_the_response(tmp_path: Path) -> None:
    async with served(tmp_path, says(CALL, "one two three four five six seven")) as it:
        long = await it.run(Add(), response_length=400)
    length = len(long.response_ids) - 3
    (tmp_path / "again").mkdir()
    async with served(tmp_path / "again", says(CALL, "one two three four five six seven")) as it:
        output = await it.run(Add(), response_length=length)
        is_the_sample(output, await it.exported())
        context = output.response_mask.count(0)
        assert it.manager.asked[1]["max_tokens"] == length - context - len(sampled(CALL))
    assert output.stop_reason == "response_length"
    assert output.response_ids == long.response_ids[:length]


async def test_a_tool_result_that_would_reach_the_length_is_not_appended(tmp_path: Path) -> None:
    tool = Add(answer="a long answer " * 20)
    async with served(tmp_path, says(CALL)) as it:
        output = await it.run(tool, response_length=len(sampled(CALL)) + 40)
        is_the_sample(output, await it.exported())
    assert output.response_ids == list(sampled(CALL))
    assert (output.stop_reason, output.num_turns) == ("response_length", 2)
    assert output.extra_fields["tool_rewards"] == [0.25]  # it was called all the same
    assert tool.released == ["instance-1"]


async def test_a_tool_result_that_reaches_the_length_exactly_is_not_appended(tmp_path: Path) -> None:
    async with served(tmp_path, says(CALL, "Done.")) as it:
        whole = await it.run(Add())
    length = len(sampled(CALL)) + whole.response_mask.count(0)
    (tmp_path / "again").mkdir()
    async with served(tmp_path / "again", says(CALL, "Done.")) as it:
        output = await it.run(Add(), response_length=length)
    assert (output.stop_reason, output.response_ids) == ("response_length", list(sampled(CALL)))


async def test_a_limit_of_the_sample_does_not_go_beyond_what_is_left_of_the_response(tmp_path: Path) -> None:
    async with served(tmp_path, says("one two three four five")) as it:
        output = await it.loop(Add(), response_length=3).run(QUESTION, {"max_tokens": 300})
        assert it.manager.asked == [{"max_tokens": 3}]
    assert len(output.response_ids) == 3


async def test_a_manager_that_samples_too_much_is_cut_in_all_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generous(*_: Any, **__: Any) -> TokenOutput:
        return TokenOutput([5, 6, 7, 8], [-0.5, -0.25, -2.0, -1.0], finish_reason="stop")

    async with served(tmp_path, says("unused")) as it:
        monkeypatch.setattr(it.manager, "generate", generous)
        output = await it.run(Add(), response_length=2)
    assert (output.response_ids, output.response_mask, output.response_logprobs) == ([5, 6], [1, 1], [-0.5, -0.25])
    assert output.stop_reason == "response_length"


async def test_experts_that_a_server_manager_of_ones_own_reports_are_those_of_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = TokenOutput([5, 6], [-0.5, -0.25], finish_reason="stop")
    reported.routed_experts = np.ones((9, 2, 1), np.uint8)

    async def generate(*_: Any, **__: Any) -> TokenOutput:
        return reported

    async with served(tmp_path, says("unused")) as it:
        monkeypatch.setattr(it.manager, "generate", generate)
        assert (await it.run(Add())).routed_experts is reported.routed_experts


class Opened(ToolAgentLoop):
    """Its prompts end in the middle of reasoning."""

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        state = await super()._handle_pending_state(agent_data, sampling_params)
        agent_data.prompt_ids = [*agent_data.prompt_ids, *tiny_renderer().encode("<think>")]
        return state


async def test_reasoning_that_the_prompt_opens_is_read_as_reasoning(tmp_path: Path) -> None:
    tool = Add()
    async with served(tmp_path, says("Both of them.</think>" + CALL, "Done."), reasoning_parser="think") as it:
        await it.loop(tool, kind=Opened).run(QUESTION)
    [data] = tool.seen
    assert data.messages[1]["reasoning_content"] == "Both of them."
    assert data.messages[1]["content"] == "I add."


async def test_a_limit_of_the_sample_holds_and_a_cut_answer_without_call_is_told(tmp_path: Path) -> None:
    async with served(tmp_path, says("one two three four five")) as it:
        output = await it.loop(Add()).run(QUESTION, {"max_new_tokens": 3})
        assert it.manager.asked == [{"max_new_tokens": 3}]
    assert (output.stop_reason, len(output.response_ids)) == ("length", 3)


async def test_an_interrupted_answer_ends_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupted(*_: Any, **__: Any) -> TokenOutput:
        return TokenOutput(sampled(CALL), None, finish_reason="abort")

    tool = Add()
    async with served(tmp_path, says("unused")) as it:
        monkeypatch.setattr(it.manager, "generate", interrupted)
        output = await it.run(tool)
    assert (output.stop_reason, output.response_logprobs) == ("aborted", None)
    assert tool.created == []


async def test_a_full_context_ends_the_loop_but_a_prompt_without_room_is_an_error(tmp_path: Path) -> None:
    async with served(tmp_path, says(CALL, "never"), max_context_tokens=330) as it:
        output = await it.run(Add(answer="a " * 60), max_tool_response_length=None, response_length=4000)
        assert output.stop_reason == "context_length"
        is_the_sample(
            AgentLoopOutput(
                output.prompt_ids,
                output.response_ids[: len(sampled(CALL))],
                output.response_mask[: len(sampled(CALL))],
                (output.response_logprobs or [])[: len(sampled(CALL))],
            ),
            await it.exported(),
        )
        with pytest.raises(InvalidRequest):
            await it.loop(Add()).run([{"role": "user", "content": "a " * 600}], {})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (call_text("subtract", "{}"), "Unknown function 'subtract'. Available tools: ['add']"),
        (call_text("add", '{"numbers": [1}'), "Invalid JSON in arguments for 'add': "),
        (call_text("add", '{"numbers": [1]}'), "Error executing tool 'add': no adder here"),
    ],
)
async def test_an_error_of_a_call_is_told_to_the_model_or_ends_the_loop(tmp_path: Path, call: str, told: str) -> None:
    tool = Add(fails=True)
    async with served(tmp_path, says(call, "I am sorry.", call)) as it:
        output = await it.run(tool)
        is_the_sample(output, await it.exported())
        assert told in it.text(output.response_ids)
        assert (output.stop_reason, output.num_turns) == ("no_tool_call", 4)
        assert output.extra_fields["tool_rewards"] == [0.0]
        stopped = await it.run(tool, on_tool_error="stop")
        assert (stopped.stop_reason, stopped.num_turns) == ("tool_error", 2)
        assert stopped.response_ids == list(sampled(call))
    assert len(tool.released) == len(tool.created)


async def test_a_cancelled_loop_releases_its_instances(tmp_path: Path) -> None:
    tool = Add(hangs=True)
    async with served(tmp_path, says(CALL * 2)) as it:
        running = asyncio.create_task(it.run(tool, max_parallel_calls=2))
        await tool.reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert sorted(tool.released) == ["instance-1", "instance-2"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ToolResponse(image=["data:image/png;base64,AAAA"]), "image"),
        (ToolResponse(image=[object()]), "an image is a PIL image"),
        (ToolResponse(video=["a video"]), "'add' returned videos"),
    ],
)
async def test_what_a_model_of_text_cannot_see_is_refused(tmp_path: Path, answer: ToolResponse, reason: str) -> None:
    tool = Add(answer=answer)
    async with served(tmp_path, says(CALL)) as it:
        with pytest.raises(InvalidRequest, match=reason):
            await it.run(tool)
    assert tool.released == ["instance-1"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep": "head"}, "abcd...(truncated)"),
        ({"keep": "tail"}, "(truncated)...ghij"),
        ({"keep": "ends"}, "ab...(truncated)...ij"),
        ({"tool_response_truncate_side": "middle"}, "ab...(truncated)...ij"),
        ({}, "ab...(truncated)...ij"),
    ],
)
async def test_long_tool_responses_are_cut(tmp_path: Path, settings: dict[str, Any], kept: str) -> None:
    async with served(tmp_path, says(CALL, "Done.")) as it:
        output = await it.run(Add(answer="abcdefghij"), max_tool_response_length=4, **settings)
        assert f"<tool_response>\n{kept}\n</tool_response>" in it.text(output.response_ids)


async def test_errors_of_tools_are_cut_too(tmp_path: Path) -> None:
    async with served(tmp_path, says(CALL, "Done.")) as it:
        output = await it.run(Add(fails=True), max_tool_response_length=5, keep="head")
        assert "<tool_response>\nError...(truncated)\n</tool_response>" in it.text(output.response_ids)


MARK = tiny_renderer().encode("<|im_start|>")[0]


class Plain(ToolParser):
    """A parser in the form of verl's documentation: calls are `add:ARGUMENTS`."""

    async def extract_tool_calls(self, responses_ids: Sequence[int]) -> Any:  # type: ignore[override]
        text = tiny_renderer().decode(np.asarray(responses_ids, np.int32))  # type: ignore[arg-type]
        name, colon, arguments = text.removesuffix("<|im_end|>").partition(":")
        return [FunctionCall(name=name, arguments=arguments)] if colon else []


class Pairs(Plain):
    """The same in the form of verl 0.9, with a stop token."""

    @property
    def stop_token_ids(self) -> list[int]:
        return [MARK]

    async def extract_tool_calls(self, responses_ids: Sequence[int], tools: Any = None) -> Any:
        assert [tool.function.name for tool in tools] == ["add"]
        return "some text", await super().extract_tool_calls(responses_ids)


@pytest.fixture(autouse=True)
def own_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToolParser, "_registry", {})


def test_the_logprobs_of_all_answers_are_called_what_the_furthest_from_the_rule_are() -> None:
    data = AgentData([])
    for of, told in [("rule", "rule"), ("model", "model"), ("rule", "model")]:
        data.add_answer(TokenOutput([1], [-0.5], versions=[3], extra_fields={"logprobs_of": of}))
        assert data.extra_fields["logprobs_of"] == told


def test_the_fields_of_all_answers_are_those_of_the_first_with_the_newest_version() -> None:
    data = AgentData([])
    data.add_answer(TokenOutput([1], [-0.5], versions=[3], extra_fields={"num_cached_tokens": 2, "mine": 1}))
    data.add_answer(TokenOutput([2], [-0.25], versions=[5], extra_fields={"num_cached_tokens": 4, "mine": 2}))
    versions = {"global_steps": 5, "min_global_steps": 3, "max_global_steps": 5}
    assert data.extra_fields == {**versions, "num_cached_tokens": 6, "mine": 1}


@pytest.mark.parametrize("parser", [Plain, Pairs])
async def test_a_parser_of_the_user_is_used_by_name(tmp_path: Path, parser: type[ToolParser]) -> None:
    ToolParser.register("mine")(parser)
    tool = Add()
    async with served(tmp_path, says('add:{"numbers": [4]}', "Done.")) as it:
        output = await it.run(tool, format="mine")
        is_the_sample(output, await it.exported())
        assert it.manager.asked[0].get("stop_token_ids") == ([MARK] if parser is Pairs else None)
    assert (output.stop_reason, output.num_turns) == ("no_tool_call", 4)
    assert tool.seen[0].messages[1]["tool_calls"][0]["id"] == tool.seen[0].messages[2]["tool_call_id"] == "call_1_0"


class Twice(Plain):
    """Reads each call as two."""

    async def extract_tool_calls(self, responses_ids: Sequence[int]) -> Any:  # type: ignore[override]
        return 2 * await super().extract_tool_calls(responses_ids)


async def test_messages_have_the_calls_of_a_users_parser_that_run(tmp_path: Path) -> None:
    ToolParser.register("mine")(Twice)
    tool = Add()
    async with served(tmp_path, says('add:{"numbers": [4]}', "Done.")) as it:
        await it.run(tool, format="mine")
    [data] = tool.seen
    assert [call["id"] for call in data.messages[1]["tool_calls"]] == ["call_1_0"]


async def test_the_parsers_stop_tokens_are_beside_those_of_the_sample(tmp_path: Path) -> None:
    ToolParser.register("mine")(Pairs)
    async with served(tmp_path, says("Done.")) as it:
        await it.loop(Add(), format="mine").run(QUESTION, {"stop_token_ids": [3]})
        assert it.manager.asked[0]["stop_token_ids"] == sorted([3, MARK])


@pytest.mark.parametrize("arguments", ['{"numbers": [4', "[4]"])
async def test_arguments_that_are_no_object_become_a_tool_message(tmp_path: Path, arguments: str) -> None:
    ToolParser.register("mine")(Plain)
    async with served(tmp_path, says(f"add:{arguments}", "Done.")) as it:
        output = await it.run(Add(), format="mine")
        is_the_sample(output, await it.exported())
        assert "Invalid JSON in arguments for 'add'" in it.text(output.response_ids)
    assert output.num_turns == 4


async def test_a_call_that_cannot_be_read_is_no_call(tmp_path: Path) -> None:
    async with served(tmp_path, says('<tool_call>\n{"name": "add", "arguments": {\n</tool_call>')) as it:
        output = await it.run(Add())
    assert (output.stop_reason, output.num_turns) == ("no_tool_call", 2)


async def test_the_servers_parsers_are_known_by_verls_names_and_ours(tmp_path: Path) -> None:
    written = {
        "hermes": CALL,
        "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=numbers>\n[1, 2]\n</parameter>\n</function>\n"
        "</tool_call>",
        "glm": "<tool_call>add\n<arg_key>numbers</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>",
        "seed": "<seed:tool_call><function=add><parameter=numbers>[1, 2]</parameter></function></seed:tool_call>",
        "minimax": '<minimax:tool_call><invoke name="add"><parameter name="numbers">[1, 2]</parameter></invoke>'
        "</minimax:tool_call>",
        "llama3": '{"name": "add", "parameters": {"numbers": [1, 2]}}',
    }
    schemas = [Add().tool_schema]
    async with served(tmp_path, says("unused")) as it:
        for name, text in written.items():
            parser = ToolParser.get_tool_parser(name, None)
            parser.server = it.session  # type: ignore[attr-defined]
            content, [call] = await parser.extract_tool_calls(list(sampled(text)), schemas)
            assert (call.name, json.loads(call.arguments)) == ("add", {"numbers": [1, 2]}), name
            assert content == ("I add." if name == "hermes" else ""), name
            [alone] = await parser.extract_tool_calls(list(sampled(text)))
            assert alone.name == "add"
        with pytest.raises(InvalidRequest, match=r"tool parser 'herms': .*hermes"):
            await it.run(Add(), format="herms")
    server_of_loop.set(None)
    with pytest.raises(InvalidRequest, match="set its 'server'"):
        await ToolParser.get_tool_parser("hermes", None).extract_tool_calls([1])


class Scoring(ToolAgentLoop):
    """Overrides a state, as users of verl do."""

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        state = await super()._handle_processing_tools_state(agent_data)
        agent_data.turn_scores.append(0.5)
        agent_data.extra_fields["seen"] = len(agent_data.messages)
        return state


async def test_states_may_be_overridden_and_both_forms_of_run_are_the_same(tmp_path: Path) -> None:
    async with served(tmp_path, says(CALL, "Done.", CALL, "Done.")) as it:
        outputs = [
            await it.loop(Add(), kind=Scoring).run(QUESTION, {}),
            await it.loop(Add(), kind=Scoring).run({}, raw_prompt=QUESTION),
        ]
    for output in outputs:
        assert output.extra_fields["turn_scores"] == [0.5]
        assert output.extra_fields["seen"] == 3
    assert outputs[0].response_ids == outputs[1].response_ids


class Printed(ToolAgentLoop):
    """Overrides the call of a tool in the form of verl's documentation."""

    noted: ClassVar[list[str]] = []

    async def _call_tool(self, tool_call: FunctionCall) -> Any:  # type: ignore[override]
        self.noted.append(tool_call.name)
        if tool_call.name == "message":
            return {"role": "tool", "content": "written by hand"}
        if tool_call.name == "error":
            return ValueError("returned")
        return await super()._call_tool(tool_call)


async def test_a_call_may_be_overridden_in_the_form_of_the_documentation(tmp_path: Path) -> None:
    calls = "".join(call_text(name, '{"numbers": [40]}') for name in ("message", "error", "add"))
    async with served(tmp_path, says(calls, "Done.")) as it:
        output = await it.loop(Add(), kind=Printed, max_parallel_calls=3).run(QUESTION, {})
        text = it.text(output.response_ids)
    assert Printed.noted == ["message", "error", "add"]
    for response in ("written by hand", "Error executing tool 'error': returned", "40"):
        assert f"<tool_response>\n{response}\n</tool_response>" in text
    assert output.extra_fields["tool_rewards"] == [0.0, 0.25]


class Raising(ToolAgentLoop):
    async def _call_tool(self, tool_call: FunctionCall, *args: Any) -> Any:  # type: ignore[override]
        if tool_call.name == "raise":
            await self.tools["add"].reached.wait()
            raise RuntimeError("raised by hand")
        return await super()._call_tool(tool_call, *args)


async def test_the_other_calls_of_a_turn_end_when_one_raises(tmp_path: Path) -> None:
    tool = Add(hangs=True)
    async with served(tmp_path, says(CALL + call_text("raise", "{}"))) as it:
        with pytest.raises(RuntimeError, match="raised by hand"):
            await it.loop(tool, kind=Raising, max_parallel_calls=2).run(QUESTION, {})
    assert tool.released == ["instance-1"]


async def test_tools_come_out_of_the_files_that_the_settings_name(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: tests.unit.tokengrove.verl.test_verl_tool_loop.Yaml\n"
    )
    async with served(tmp_path, says(CALL, "Done.")) as it:
        config = {"actor_rollout_ref": {"rollout": {"multi_turn": {"tool_config_path": str(tmp_path / "tools.yaml")}}}}
        loop = ToolAgentLoop(config, it.manager, None)
        output = await loop.run(QUESTION, {})
    assert list(loop.tools) == ["add"]
    assert output.num_turns == 4


class Yaml(Add):
    def __init__(self, config: Any, tool_schema: Any) -> None:
        super().__init__()


class Shared(AgentLoopBase):
    """A loop in the form of verl's documentation, whose class has the parser."""

    tool_parser: ClassVar[ToolParser]

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        if not cls._class_initialized:
            cls._class_initialized = True
            cls.tool_parser = cls.get_tool_parser(config.actor_rollout_ref.rollout.multi_turn.format)

    async def run(self, messages: Any, sampling_params: Any) -> AgentLoopOutput:  # type: ignore[override]
        ids = list(sampled(CALL))
        calls = await self.tool_parser.extract_tool_calls(ids)
        return AgentLoopOutput(ids, ids, [1] * len(ids), extra_fields={"calls": [call.name for call in calls]})


async def test_loops_of_several_sessions_share_the_parser_of_their_class(tmp_path: Path) -> None:
    async with served(tmp_path, says("unused")) as it, it.client.session("other") as other:
        outputs = [await Shared({}, Manager(session), None).run([], {}) for session in (it.session, other)]
    assert [output.extra_fields["calls"] for output in outputs] == [["add"], ["add"]]


async def test_a_call_in_an_answer_that_was_cut_behind_it_is_called(tmp_path: Path) -> None:
    cut = Reply(sampled(CALL, end=False), finish=FinishReason.LENGTH)
    async with served(tmp_path, play([cut, Reply(sampled("Done."))])) as it:
        output = await it.run(Add())
        is_the_sample(output, await it.exported())
        assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>" in it.text(output.response_ids)
    assert (output.stop_reason, output.num_turns) == ("no_tool_call", 4)


async def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    async with served(tmp_path, says("unused")) as it:
        with pytest.raises(InvalidRequest, match="'on_tool_error' must be 'message' or 'stop', not 'raise'"):
            it.loop(on_tool_error="raise")
        with pytest.raises(InvalidRequest, match="'max_parallel_calls' must be at least 1"):
            it.loop(max_parallel_calls=0)
        with pytest.raises(UnsupportedParameter, match="'interaction_config_path' is not supported"):
            it.loop(interaction_config_path="interaction.yaml")
        with pytest.raises(InvalidRequest, match="two tools have the name add"):
            it.loop(Add(), Add())
        with pytest.raises(InvalidRequest, match="give the messages"):
            await it.loop().run({})
        with pytest.raises(InvalidRequest, match="needs an AsyncLLMServerManager"):
            ToolAgentLoop({}, None, None, tools=[])
