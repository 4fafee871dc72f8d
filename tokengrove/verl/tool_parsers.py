"""Tool calls in sampled ids, by the name of a parser: the server's own parsers, and registered classes.

The server parses an output in the same way as for an agent's own requests; a call inside reasoning is not a call. A
call whose arguments are invalid JSON keeps them as text, and the loop reports the error to the model, as with most of
verl's parsers (its hermes drops such a call). A call without a name and arguments remains text.
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
"""The server that parses for the loop of this task. Parsers that a class of loops shares have no server."""

Parser = TypeVar("Parser", bound="type[ToolParser]")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call as the model wrote it. `arguments`: JSON text, possibly invalid. `tool_call_id`: its id, or None."""

    name: str
    arguments: str
    tool_call_id: str | None = None

    def model_dump(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self.arguments, "tool_call_id": self.tool_call_id}


class ToolParser(ABC):
    """Base class of parsers, with verl's names. `tokenizer`: the tokenizer of the loop."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids that end an answer, in addition to those of the model."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[OpenAIFunctionToolSchema] | None = None
    ) -> Any:
        """Return (content, list of FunctionCall): the text without the calls, and the calls.

        Without `tools`, parsers of the server return the list of calls only, as verl's documentation prints it; other
        parsers may do the same.
        """

    @classmethod
    def get_tool_parser(cls, name: str | None, tokenizer: Any = None) -> ToolParser:
        """The parser that is registered as `name`, else the server's parser of that name (None: the model's parser).

        The server knows the names of `--tool-parser`, including verl's. It rejects other names and lists its own.
        """
        if name is not None and name in cls._registry:
            return cls._registry[name](tokenizer)
        return ServerToolParser(tokenizer, name)

    @classmethod
    def register(cls, name: str) -> Callable[[Parser], Parser]:
        """Register the decorated class under a name. It replaces an earlier class or a parser of the server."""

        def decorator(subclass: Parser) -> Parser:
            cls._registry[name] = subclass
            return subclass

        return decorator


class ServerToolParser(ToolParser):
    """The server's parser of outputs (`POST /v1/parse`).

    `server` has `parse`: a session or a client; None: the server of the last loop created in the current task.
    """

    def __init__(self, tokenizer: Any, name: str | None, server: Any = None) -> None:
        super().__init__(tokenizer)
        self.name = name
        self.server = server

    async def message(
        self, ids: Sequence[int], tools: Sequence[Any] = (), prompt_ids: Sequence[int] = ()
    ) -> dict[str, Any]:
        """The assistant message that the ids represent.

        `prompt_ids`: the end of the prompt, which shows whether the output begins inside reasoning. Raises
        InvalidRequest if the server has no parser of this name, or if there is no server.
        """
        server = server_of_loop.get() if self.server is None else self.server
        if server is None:
            raise InvalidRequest(
                f"the tool parser {self.name!r} needs a server: set its 'server' to a client or session"
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
    """The tool calls of an assistant message."""
    return [
        FunctionCall(call["function"]["name"], call["function"]["arguments"], call.get("id"))
        for call in message.get("tool_calls") or ()
    ]


def schema_json(schema: Any) -> dict[str, Any]:
    """A tool's schema (ours, verl's, or a mapping) in the format of a request's `tools`."""
    if isinstance(schema, Mapping):
        return dict(schema)
    dumped: dict[str, Any] = schema.model_dump(exclude_unset=True, exclude_none=True)
    return dumped
