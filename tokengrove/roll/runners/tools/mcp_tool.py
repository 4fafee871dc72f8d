"""A tool for the tools of an MCP server, which an agent calls in its text."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.imports import load

T = TypeVar("T")

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_INSTRUCTION = """You may call these tools:
{tools}
To call one, end your text with a JSON object in tags, as here, where the next message has the result:
<tool_call>{{"tool_name": "{name}", "tool_params": {{...}}}}</tool_call>"""


class MCPTool:
    """Calls the tools of the MCP server at `server_url`, over HTTP or SSE; needs fastmcp.

    A call is the first JSON object in `<tool_call>` tags, with `tool_name` and `tool_params`, or with `name` and
    `arguments`. Its observation is the text of the result. A call fails if the server reports an error, if it cannot be
    parsed, names an unknown tool, or takes longer than `timeout` seconds; the observation then has the reason.

    Instead of an address, `client` is a client of fastmcp, or an asynchronous context manager with its `list_tools` and
    `call_tool`. `tool_names_subset`: only these tools. `custom_prompt`: the instruction for the model instead of the
    tools' schemas. The connection is opened on first use; `close` ends it.
    """

    tool_type = "mcp"

    def __init__(
        self,
        server_url: str | None = None,
        client: Any = None,
        tool_names_subset: Sequence[str] | None = None,
        custom_prompt: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._client = _client(server_url) if client is None else client
        self._only, self._prompt, self._timeout = tool_names_subset, custom_prompt, timeout
        self._connection: _Connection | None = None

    def instruction_string(self) -> str:
        if self._prompt is not None:
            return self._prompt
        tools = self._connected().tools
        schemas = "\n".join(json.dumps(each, ensure_ascii=False) for each in tools.values())
        return _INSTRUCTION.format(tools=schemas, name=next(iter(tools), "name"))

    def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
        """Return whether there is a call, whether it failed, its result, and the text up to the end of the call."""
        if (found := _CALL.search(action)) is None:
            return False, True, "", action
        failed, observation = self._result(found.group(1))
        return True, failed, observation, action[: found.end()]

    def close(self) -> None:
        """End the connection; the next use opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> _Connection:
        if self._connection is None:
            self._connection = _Connection(self._client, self._only, self._timeout)
        return self._connection

    def _result(self, text: str) -> tuple[bool, str]:
        """Whether a call failed, and its result."""
        try:
            name, arguments = _call(text)
            connection = self._connected()
            if name not in connection.tools:
                raise InvalidRequest(f"there is no tool {name!r}; there are {', '.join(connection.tools)}")
            return connection.result(name, arguments)
        except TimeoutError:
            return True, f"The call took longer than {self._timeout:g} seconds."
        except Exception as error:
            return True, f"The call failed: {error}"


class _Connection:
    """A connected client, on an event loop in its own thread. `tools`: their schemas by name."""

    def __init__(self, client: Any, only: Sequence[str] | None, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, list[Any]]] = Future()
        threading.Thread(target=lambda: asyncio.run(self._hold(ready)), name="mcp", daemon=True).start()
        self._loop, self._leave, listed = ready.result()
        shown = {each.name: {"name": each.name, **_schema(each)} for each in listed}
        self.tools = {name: each for name, each in shown.items() if only is None or name in only}

    def result(self, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        """Call a tool; return whether it failed, and its text. Raises TimeoutError, and the client's exceptions."""
        result = self._run(self._client.call_tool(name, arguments))
        failed = getattr(result, "is_error", getattr(result, "isError", False))
        content = getattr(result, "content", result)
        return bool(failed), "\n".join(getattr(part, "text", str(part)) for part in content)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._leave.set)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, self._timeout_s), self._loop).result()

    async def _hold(self, ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, list[Any]]]) -> None:
        """Stay connected until `close`: a client must be entered and left in one task."""
        leave = asyncio.Event()
        try:
            async with AsyncExitStack() as entered:
                async with asyncio.timeout(self._timeout_s):
                    await entered.enter_async_context(self._client)
                    listed = list(await self._client.list_tools())
                ready.set_result((asyncio.get_running_loop(), leave, listed))
                await leave.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)


def _client(server_url: str | None) -> Any:
    if server_url is None:
        raise InvalidRequest("an MCP tool needs the server_url of its server, or a client", param="server_url")
    try:
        return load("fastmcp:Client")(server_url)
    except InvalidRequest:
        raise InvalidRequest("an MCP tool needs fastmcp: pip install fastmcp") from None


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a call. Raises ValueError for an invalid call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the text in the tags is not JSON ({error})") from None
    if not isinstance(call, dict):
        raise ValueError("a call is a JSON object with tool_name and tool_params")
    name, arguments = call.get("tool_name", call.get("name")), call.get("tool_params", call.get("arguments", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("a call is a JSON object with tool_name (a text) and tool_params (an object)")
    return name, arguments


def _schema(tool: Any) -> dict[str, Any]:
    schema = getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None) or {}
    return {"description": getattr(tool, "description", None) or "", "parameters": schema}
