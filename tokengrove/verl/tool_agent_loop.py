"""verl's loop of answers and tool calls. The response consists of the sampled ids and of the ids of tool responses:
answers are never rendered again, and tool responses that would reach `response_length` are not appended. The model
receives the images of the prompt and of tools in their order of arrival.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any
from uuid import uuid4

from tokengrove.client.image_urls import images_of
from tokengrove.errors import InvalidRequest, ProxyError, UnsupportedParameter
from tokengrove.verl.agent_data import AgentData, AgentState
from tokengrove.verl.loop_base import AgentLoopBase, accepted
from tokengrove.verl.outputs import AgentLoopMetrics, AgentLoopOutput
from tokengrove.verl.registry import register
from tokengrove.verl.tool_parsers import FunctionCall, ServerToolParser, ToolParser, calls_of, schema_json
from tokengrove.verl.tools import ToolResponse, load_all_tools
from tokengrove.verl.tools.registry import distinct
from tokengrove.verl.tools.tool_use import ToolResult, use_tool
from tokengrove.verl.tracing import rollout_trace_op, simple_timer
from tokengrove.verl.truncation import Truncation

_logger = logging.getLogger(__name__)
_TAIL = 64
"""The number of ids before an answer that show whether the prompt opens reasoning."""
_LIMITS = ("max_tokens", "max_new_tokens", "max_completion_tokens")
Answered = tuple[ToolResponse, float | None, dict[str, Any]]
"""The response of a tool, its reward and its metrics."""


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Samples an answer, calls its tools, appends their responses, and repeats this until a limit or an answer without
    calls.

    The settings are those of `actor_rollout_ref.rollout.multi_turn`, as in verl, with `keep` (see Truncation) and
    `on_tool_error`: `message` tells the model the error, `stop` ends the loop. `tools` (a list, or an object with
    `tools`) replaces `tool_config_path` and `function_tool_path`. The first `max_parallel_calls` calls of a turn run,
    concurrently; the ids of the others stay in the response. `format` is the name of the tool parser; None: the parser
    of the server's model.

    `stop_reason` of the output is `response_length`, `max_assistant_turns`, `max_user_turns`, `no_tool_call`, `length`
    (an answer without a call was cut), `tool_error`, `aborted` or `context_length`. `num_turns` is user turns (rounds
    of tool responses) + answers + 1.
    """

    def __init__(self, *args: Any, tools: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.rollout_config.multi_turn
        if settings.get("interaction_config_path") is not None:
            message = (
                "'interaction_config_path' is not supported (nor by verl 0.9): write a loop that adds the user's turns"
            )
            raise UnsupportedParameter(message, param="interaction_config_path")
        self.max_user_turns: int | None = settings.max_user_turns
        self.max_assistant_turns: int | None = settings.max_assistant_turns
        self.max_parallel_calls: int = settings.max_parallel_calls
        if self.max_parallel_calls < 1:
            raise InvalidRequest("'max_parallel_calls' must be at least 1", param="max_parallel_calls")
        self.max_tool_response_length: int | None = settings.max_tool_response_length
        self.tool_response_truncate_side: str | None = settings.tool_response_truncate_side
        self.truncation = Truncation.of(settings)
        self.on_tool_error: str = settings.on_tool_error
        if self.on_tool_error not in ("message", "stop"):
            message = f"'on_tool_error' must be 'message' or 'stop', not {self.on_tool_error!r}"
            raise InvalidRequest(message, param="on_tool_error")
        given = getattr(tools, "tools", tools)
        paths = settings.tool_config_path, settings.function_tool_path
        self.tool_list = loaded = load_all_tools(*paths) if given is None else distinct(given)
        self.tools: dict[str, Any] = {tool.name: tool for tool in loaded}
        self.tool_schemas = [schema_json(tool.tool_schema) for tool in loaded]
        self.tool_parser_name: str | None = settings.format
        self.tool_parser = ToolParser.get_tool_parser(self.tool_parser_name, self.tokenizer)
        if isinstance(self.tool_parser, ServerToolParser):
            self.tool_parser.server = self._server
        self.prompt_length: int = self.rollout_config.prompt_length
        self.response_length: int = self.rollout_config.response_length

    @rollout_trace_op
    async def run(self, messages: Any = None, sampling_params: Any = None, **kwargs: Any) -> AgentLoopOutput:
        """Run one sample: `run(messages, sampling_params)`, or `run(sampling_params, raw_prompt=messages)`.

        `tools_kwargs`: for each tool by name `create_kwargs`, `execute_kwargs`, `release_kwargs`, and
        `calc_reward_kwargs`. With the last, `calc_reward` is called after each call, and the output's `reward_score` is
        the sum over the tools of the last value of each. `extra_info["tool_selection"]`: the names of the sample's
        tools. Raises the server's errors, and UnsupportedParameter for a tool that returns videos.
        """
        if isinstance(messages, Mapping):
            messages, sampling_params = None, messages
        given = kwargs.get("raw_prompt") if messages is None else messages
        if given is None:
            raise InvalidRequest("give the messages: run(messages, sampling_params), or raw_prompt", param="raw_prompt")
        messages = [dict(message) for message in given]
        media = await self.process_multi_modal_info(messages)
        self.agent_data = data = AgentData(
            messages, media.get("images"), request_id=uuid4().hex, tools_kwargs=kwargs.get("tools_kwargs")
        )
        data.tools = self._selected((kwargs.get("extra_info") or {}).get("tool_selection"))
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            try:
                state = await self._step(state, data, dict(sampling_params or {}))
            except ProxyError as error:
                if error.code != "context_length_exceeded" or not data.assistant_turns:
                    raise
                state = data.stopped("context_length")
        return self._output(data)

    async def _step(self, state: AgentState, data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        if state is AgentState.PENDING:
            return await self._handle_pending_state(data, sampling_params)
        if state is AgentState.GENERATING:
            return await self._handle_generating_state(data, sampling_params)
        return await self._handle_processing_tools_state(data)

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        """Render the prompt."""
        agent_data.prompt_ids = await self.build_prompt(agent_data.messages, _schemas(agent_data))
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """Sample an answer, and parse its calls. `ignore_termination`: continue beyond `response_length`."""
        with simple_timer("generate_sequences", agent_data.metrics):
            output = await self.server_manager.generate(
                request_id=agent_data.request_id,
                prompt_ids=agent_data.prompt_ids,
                sampling_params=self._limited(agent_data, sampling_params),
                **self.media_options(agent_data.image_data),
            )
        agent_data.add_answer(output)
        if (reason := self._limit_reached(agent_data, output, ignore_termination)) is not None:
            return agent_data.stopped(reason)
        agent_data.messages.append(await self._read_calls(agent_data))
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        was_cut = getattr(output, "finish_reason", None) == "length"
        return agent_data.stopped("length" if was_cut else "no_tool_call")

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        """Call the tools, and append their responses."""
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        errors = len(agent_data.tool_errors)
        with simple_timer("tool_calls", agent_data.metrics):
            results = await _together([self._called(call, agent_data) for call in calls])
        for call, (response, reward, metrics) in zip(calls, results, strict=True):
            if response.video:
                message = f"the tool {call.name!r} returned videos; the server's models read texts and images"
                raise UnsupportedParameter(message)
            agent_data.add_result(call.name, reward, metrics)
        if self.on_tool_error == "stop" and len(agent_data.tool_errors) > errors:
            return agent_data.stopped("tool_error")
        return await self._append(
            agent_data,
            [
                {"role": "tool", "tool_call_id": call.tool_call_id, "content": _shown(response)}
                for call, (response, _, _) in zip(calls, results, strict=True)
            ],
        )

    async def _called(self, call: FunctionCall, agent_data: AgentData) -> Answered:
        """Call `_call_tool`. A subclass may override it in the form of verl's documentation, which accepts only the
        call and returns a message or an exception.
        """
        given: tuple[Any, ...] = (call, agent_data.tools_kwargs, agent_data)
        try:
            inspect.signature(self._call_tool).bind(*given)
        except TypeError:
            given = (call,)
        found: Any = await self._call_tool(*given)
        if isinstance(found, Mapping):
            return _response(found.get("content")), None, {}
        if isinstance(found, Exception):
            return self._failed(agent_data, f"Error executing tool '{call.name}': {found}")
        answered: Answered = found
        return answered

    async def _call_tool(
        self,
        tool_call: FunctionCall,
        tools_kwargs: Mapping[str, Any] | None = None,
        agent_data: AgentData | None = None,
    ) -> Answered:
        """Call one tool; return its response, truncated, its reward and its metrics. Errors become the text.

        `tools_kwargs` and `agent_data` default to those of the loop's run.
        """
        agent_data = self.agent_data if agent_data is None else agent_data
        tools_kwargs = agent_data.tools_kwargs if tools_kwargs is None else tools_kwargs
        name = tool_call.name
        try:
            result = await self._result_of(tool_call, tools_kwargs, agent_data)
        except _BadCall as error:
            return self._failed(agent_data, str(error))
        except Exception as error:
            return self._failed(agent_data, f"Error executing tool '{name}': {error}")
        if result.score is not None:
            agent_data.reward_scores[name] = result.score
        text = result.response.text
        response = result.response.model_copy(update={"text": text and self.truncation.cut(text)})
        return response, result.reward, result.metrics

    async def _result_of(
        self, tool_call: FunctionCall, tools_kwargs: Mapping[str, Any], agent_data: AgentData
    ) -> ToolResult:
        name = tool_call.name
        if name not in agent_data.tools:
            raise _BadCall(f"Unknown function '{name}'. Available tools: {list(agent_data.tools)}")
        try:
            arguments = json.loads(tool_call.arguments)
        except (json.JSONDecodeError, TypeError, RecursionError) as error:
            raise _BadCall(f"Invalid JSON in arguments for '{name}': {error}") from None
        if not isinstance(arguments, dict):
            raise _BadCall(f"Invalid JSON in arguments for '{name}': an object is expected")
        return await use_tool(agent_data.tools[name], arguments, tools_kwargs.get(name) or {}, agent_data)

    def _failed(self, agent_data: AgentData, message: str) -> Answered:
        _logger.warning("%s", message)
        agent_data.tool_errors.append(message)
        return ToolResponse(text=self.truncation.cut(message)), 0.0, {"errors": 1}

    async def _read_calls(self, agent_data: AgentData) -> dict[str, Any]:
        """Parse the calls of the last answer; return the answer as a message with the calls that will run."""
        ids, schemas = agent_data.response_ids, [tool.tool_schema for tool in agent_data.tools.values()]
        if isinstance(self.tool_parser, ServerToolParser):
            before = agent_data.prompt_ids[-len(ids) - _TAIL : -len(ids) or None]
            message = await self.tool_parser.message(ids, schemas, before)
            agent_data.tool_calls = calls_of(message)
            if agent_data.tool_calls:
                message["tool_calls"] = message["tool_calls"][: self.max_parallel_calls]
            return message
        extract = self.tool_parser.extract_tool_calls
        found = await extract(ids, **accepted(extract, {"tools": schemas}))
        content, calls = found if isinstance(found, tuple) else (await self._server.detokenize(ids), found)
        agent_data.tool_calls = [
            FunctionCall(call.name, call.arguments, getattr(call, "tool_call_id", None) or agent_data.call_id(index))
            for index, call in enumerate(calls)
        ]
        return _assistant(content, agent_data.tool_calls[: self.max_parallel_calls])

    async def _append(self, agent_data: AgentData, added: Sequence[dict[str, Any]]) -> AgentState:
        """Append the messages of tools, unless the response would become too long."""
        known = {
            "messages": len(agent_data.messages),
            "token_ids": agent_data.prompt_ids,
            "output_tokens": len(agent_data.response_ids),
        }
        messages = [*agent_data.messages, *added]
        shown = await self.with_urls(messages)
        ids = await self._server.tokenize(shown, continue_from=known, **self._rendering(agent_data))
        if len(agent_data.response_mask) + len(ids) - len(agent_data.prompt_ids) >= self.response_length:
            return agent_data.stopped("response_length")
        agent_data.messages = messages
        if images := images_of(added):
            agent_data.image_data = [*(agent_data.image_data or ()), *images]
        agent_data.add_context(ids)
        agent_data.user_turns += 1
        return AgentState.GENERATING

    def _limit_reached(self, agent_data: AgentData, output: Any, ignore_termination: bool) -> str | None:
        if getattr(output, "stop_reason", None) == "aborted":
            return "aborted"
        if not ignore_termination and len(agent_data.response_mask) >= self.response_length:
            return "response_length"
        if self.max_assistant_turns and agent_data.assistant_turns >= self.max_assistant_turns:
            return "max_assistant_turns"
        if self.max_user_turns and agent_data.user_turns >= self.max_user_turns:
            return "max_user_turns"
        return None

    def _limited(self, agent_data: AgentData, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters, limited to the rest of the response, with the parser's stop tokens."""
        params = dict(sampling_params)
        if (left := self.response_length - len(agent_data.response_mask)) > 0:
            name = next((name for name in _LIMITS if params.get(name) is not None), _LIMITS[0])
            params[name] = min(params.get(name) or left, left)
        if stops := self.tool_parser.stop_token_ids:
            params["stop_token_ids"] = sorted({*(params.get("stop_token_ids") or ()), *stops})
        return params

    def _rendering(self, agent_data: AgentData) -> dict[str, Any]:
        """The fields that the chat template needs in addition to the messages."""
        fields = {"tools": _schemas(agent_data), "chat_template_kwargs": self.apply_chat_template_kwargs}
        return {name: value for name, value in fields.items() if value}

    def _selected(self, names: Sequence[str] | None) -> dict[str, Any]:
        """The tools of a sample: all, or those that it selects."""
        if names is None or len(names) == 0:
            return self.tools
        if missing := [name for name in names if name not in self.tools]:
            _logger.warning("tool_selection names %s, but the tools are %s", missing, list(self.tools))
        return {name: self.tools[name] for name in names if name in self.tools}

    def _output(self, data: AgentData) -> AgentLoopOutput:
        start, length = len(data.prompt_ids) - len(data.response_mask), self.response_length
        scores = {"reward_scores": data.reward_scores} if data.reward_scores else {}
        return AgentLoopOutput(
            prompt_ids=data.prompt_ids[:start],
            response_ids=data.prompt_ids[start:][:length],
            response_mask=data.response_mask[:length],
            response_logprobs=None if data.response_logprobs is None else data.response_logprobs[:length],
            reward_score=sum(data.reward_scores.values()) if data.reward_scores else None,
            num_turns=data.user_turns + data.assistant_turns + 1,
            metrics=AgentLoopMetrics.of(data.metrics),
            multi_modal_data={"images": data.image_data} if data.image_data else None,
            routed_experts=data.routed_experts,
            extra_fields={
                **data.extra_fields,
                "turn_scores": data.turn_scores,
                "tool_rewards": data.tool_rewards,
                **scores,
            },
            stop_reason=data.stop_reason,
            named_rewards={"tool": data.turn_rewards} if data.turn_rewards else {},
        )

    @property
    def _server(self) -> Any:
        """The session, or a server of the manager, that renders and parses."""
        handles = getattr(self.server_manager, "server_handles", ())
        if not handles:
            message = f"{type(self).__name__} needs an AsyncLLMServerManager of tokengrove.verl"
            raise InvalidRequest(message, param="server_manager")
        return handles[0]


def _response(content: Any) -> ToolResponse:
    """The response in the content of a tool's message: a text, or parts with texts and images."""
    if not isinstance(content, list):
        return ToolResponse(text=content or "")
    texts = [part.get("text") or "" for part in content if part.get("type") == "text"]
    return ToolResponse(text="".join(texts), image=images_of([{"content": content}]) or None)


def _shown(response: ToolResponse) -> Any:
    """The content of a tool's message: its text, or its images followed by its text."""
    images = [{"type": "image", "image": image} for image in response.image or () if image is not None]
    text = [{"type": "text", "text": response.text}] if response.text else []
    return [*images, *text] if images else response.text or ""


class _BadCall(Exception):
    """The model called an unknown tool, or with arguments that are not a JSON object."""


async def _together(calls: Sequence[Coroutine[Any, Any, Answered]]) -> list[Answered]:
    """Await all calls. If one raises or the caller is cancelled, cancel the others and wait for them."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


def _schemas(agent_data: AgentData) -> list[dict[str, Any]]:
    return [schema_json(tool.tool_schema) for tool in agent_data.tools.values()]


def _assistant(content: str, calls: Sequence[FunctionCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if calls:
        message["tool_calls"] = [
            {"id": call.tool_call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message
