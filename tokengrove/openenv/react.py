"""A ReAct harness: the model calls the tools of an environment until it answers without a call, or the episode is over.

It owns its loop and sends chat completions, so that it works with any address: of an intercepted or a sampled session.
If the environment rejects a call, the model receives the error; other failures of the environment end the harness.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Protocol

import httpx

from tokengrove.rollout.failures import AgentFailed

Body = dict[str, Any]


class Resource(Protocol):
    """An environment in openenv 0.10's interface for harnesses (`openenv.core.harness.ResourceSession`)."""

    def initial_messages(self) -> list[Body]: ...
    def list_tools(self) -> list[Any]: ...
    def call_tool(self, name: str, arguments: Body) -> Any: ...
    def verify(self, transcript: list[Body], final_state: Any | None = None) -> Any: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Transcript:
    """The record of a harness. `done`: it ended by itself, and not because of `max_turns`."""

    messages: list[Body] = field(default_factory=list)
    tool_trace: list[Body] = field(default_factory=list)
    turns: int = 0
    done: bool = False

    def final_state(self) -> Body:
        """The state for an environment's `verify`, in addition to the messages."""
        metrics = {"turns": self.turns, "tool_calls": len(self.tool_trace)}
        return {"done": self.done, "metrics": metrics, "events": [], "tool_trace": list(self.tool_trace)}


class ReAct:
    """Plays one episode of `resource` in at most `max_turns` turns. `sampling`: further fields of each request.

    `transcript` is the record so far.
    """

    def __init__(self, resource: Resource, max_turns: int = 10, sampling: Mapping[str, Any] | None = None) -> None:
        self._resource, self._max_turns, self._sampling = resource, max_turns, dict(sampling or {})
        self.transcript = Transcript()

    def __call__(self, task: Any, base_url: str, api_key: str, http_client: httpx.Client) -> Transcript:
        """Play it with the model at `base_url`. Raises AgentFailed for an error response."""
        ask = _asking(http_client, base_url, api_key)
        told, tools = self.transcript, [tool_json(tool) for tool in self._resource.list_tools()]
        told.messages = list(self._resource.initial_messages())
        while told.turns < self._max_turns and not told.done:
            body = {"model": "policy", **self._sampling, "messages": told.messages}
            answer = ask({**body, "tools": tools} if tools else body)
            told.messages = [*told.messages, answer]
            told.turns += 1
            calls = answer.get("tool_calls") or []
            told.done = not calls
            for call in calls:
                if not told.done:
                    self._act(call)
        return told

    def _act(self, call: Mapping[str, Any]) -> None:
        name, told = call["function"]["name"], self.transcript
        arguments, result, error = _arguments(call["function"]["arguments"]), None, None
        try:
            if not isinstance(arguments, dict):
                raise ValueError(f"the arguments of {name!r} are not a JSON object")
            result = self._resource.call_tool(name, arguments)
            error = getattr(result, "error", None)
        except (KeyError, ValueError, TypeError) as failure:  # an error of the model, which may retry
            error = _text_of(failure)
        told.done = bool(getattr(result, "done", False))
        shown = {"data": getattr(result, "data", result), "done": told.done, "error": error}
        shown["metadata"] = dict(getattr(result, "metadata", None) or {})
        told.tool_trace.append({"tool_name": name, "arguments": arguments, "result": shown})
        content = f"error: {error}" if error is not None and shown["data"] is None else written(shown["data"])
        told.messages = [
            *told.messages,
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content},
        ]


def _asking(client: httpx.Client, base_url: str, api_key: str) -> Callable[[Body], Body]:
    """A function that sends a chat completion and returns the message of its answer."""

    def ask(body: Body) -> Body:
        headers = {"authorization": f"Bearer {api_key}"}
        response = client.post(f"{base_url}/chat/completions", json=body, headers=headers)
        if response.status_code != httpx.codes.OK:
            raise AgentFailed("the model", f"answered {response.status_code}: {response.text[:500]}")
        message: Body = response.json()["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None or name == "content"}

    return ask


def tool_json(tool: Any) -> Body:
    """A tool in the format of chat completions, from openenv's or MCP's (`name`, `description`, `input_schema`)."""
    if isinstance(tool, Mapping):
        if "function" in tool:
            return dict(tool)
        schema = tool.get("input_schema") or tool.get("inputSchema")
        name, description = tool["name"], tool.get("description")
    else:
        schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)
        name, description = tool.name, getattr(tool, "description", None)
    function = {"name": name, "description": description or "", "parameters": schema or {"type": "object"}}
    return {"type": "function", "function": function}


def written(data: Any) -> str:
    """The result of a tool as text for the model."""
    if data is None:
        return ""
    return data if isinstance(data, str) else json.dumps(_plain(data), ensure_ascii=False, sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _text_of(error: BaseException) -> str:
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    return str(text) or type(error).__name__
