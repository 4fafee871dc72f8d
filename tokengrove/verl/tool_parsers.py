"""Tool calls out of sampled ids, by the name of a parser: the server's own parsers, and classes that users register.

The server reads an output as it does for an agent's own requests, so the two never differ: a call inside of reasoning
is none. A call whose arguments are no valid JSON has them as they were written, and the loop tells the model, as with
most of verl's parsers (its hermes drops such a call). What has no name and arguments stays text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tokengrove.errors import InvalidRequest
from tokengrove.verl.tools import OpenAIFunctionToolSchema

server_of_loop: ContextVar[Any] = ContextVar("server_of_loop", default=None)
"""What parses for the loop of this task. A parser that a class of loops shares has no server of its own."""

Parser = TypeVar("Parser", bound="type[ToolParser]")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call as the model wrote it. `arguments` is JSON text that may be invalid; `tool_call_id` None: it has no id."""

    name: str
    arguments: str
    tool_call_id: str | None = None

    def model_dump(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments, "tool_call_id": self.tool_call_id}


class ToolParser(ABC):
    """Base class of parsers, under verl's names. `tokenizer`: whatever the loop has."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end an answer, beside those of the model."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[OpenAIFunctionToolSchema] | None = None
    ) -> Any:
        """Return (content, list of FunctionCall): the text without the calls, and the calls.

        Called without `tools`, a parser of the server returns the calls alone, as verl's documentation prints it; so
        may a parser of yours.
        """

    @classmethod
    def get_tool_parser(cls, name: str | None, tokenizer: Any = None) -> ToolParser:
        """Return the parser that was registered under `name`, else the server's of that name (None: of its model).

        The server knows the names of `--tool-parser`, verl's among them. It refuses others and lists its own.
        """
        if name is not None and name in cls._registry:
            return cls._registry[name](tokenizer)
        return ServerToolParser(tokenizer, name)

    @classmethod
    def register(cls, name: str) -> Callable[[Parser], Parser]:
        """Register the decorated class under a name. A later one replaces it, and one of the server."""

        def decorator(subclass: Parser) -> Parser:
            cls._registry[name] = subclass
            return subclass

        return decorator


class ServerToolParser(ToolParser):
    """What the server's output parser finds (`POST /v1/parse`).

    `server` has `parse`: a session or a client; None: that of the loop which was made last in the task that asks.
    """

    def __init__(self, tokenizer: Any, name: str | None, server: Any = None) -> None:
        super().__init__(tokenizer)
        self.name = name
        self.server = server

    async def message(
        self, ids: Sequence[int], tools: Sequence[Any] = (), prompt_ids: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Return the assistant's message that the ids are.

        `prompt_ids`: the end of the prompt, by which the server sees whether the output begins within reasoning.
        Raises InvalidRequest if the server knows no parser of this name, or if there is no server to ask.
        """
        server = server_of_loop.get() if self.server is None else self.server
        if server is None:
            raise InvalidRequest(
                f"the tool parser {self.name!r} is the server's: set its 'server' to a client or session"
            )
        options = {
            "tools": [schema_json(tool) for tool in tools],
            "tool_parser": self.name,
            "prompt_ids": list(prompt_ids),
        }
        given = {name: value for name, value in options.items() if value}
        try:
            found: dict[str, Any] = await server.parse(list(ids), **given)
        except InvalidRequest as error:
            own = ", ".join(sorted(self._registry))
            known = f"; registered here: {own}" if own else ""
            raise InvalidRequest(f"tool parser {self.name!r}: {error.message}{known}", param="format") from None
        return found

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[OpenAIFunctionToolSchema] | None = None
    ) -> Any:
        message = await self.message(responses_ids, tools or ())
        calls = calls_of(message)
        return calls if tools is None else (message.get("content") or "", calls)


def calls_of(message: Mapping[str, Any]) -> list[FunctionCall]:
    """Return the tool calls of an assistant's message."""
    return [
        FunctionCall(call["function"]["name"], call["function"]["arguments"], call.get("id"))
        for call in message.get("tool_calls") or ()
    ]


def schema_json(schema: Any) -> dict[str, Any]:
    """Return a tool's schema (ours, verl's, or a mapping) as the `tools` of a request have it."""
    if isinstance(schema, Mapping):
        return dict(schema)
    dumped: dict[str, Any] = schema.model_dump(exclude_unset=True, exclude_none=True)
    return dumped
