"""The model service based on `tokengrove serve --engine mailbox`: all APIs, with streaming, for any agent.

The exact tokens of a turn are recorded by the server that samples them, not here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tokengrove.client import AsyncClient, operations
from tokengrove.client.options import Delivery
from tokengrove.errors import InvalidRequest, NotFound
from tokengrove.roll.rock.command_client import CommandClient
from tokengrove.roll.rock.model_service import SESSION_END, ModelService
from tokengrove.rollout.sandboxes.sandbox import Sandbox, SandboxProcess

DEFAULT_PORT = 28080
_CONTEXT = 100_000_000  # the sampling server limits the context
_LISTENING = re.compile(r" at (http://\S+)")
_PATIENCE_S = 7 * 24 * 3600  # the runner has time limits
_LOOK_S, _POLL_S = 0.05, 10.0
_log = logging.getLogger(__name__)


class MailboxModelService(ModelService):
    """Started in the sandbox on `port`, or on a free port in a sandbox that shares the ports of this machine."""

    def __init__(self, port: int = DEFAULT_PORT) -> None:
        self._port = port
        self._key = secrets.token_urlsafe(24)
        self._client: AsyncClient | CommandClient | None = None
        self._session_id = ""
        self._letter: Mapping[str, Any] | None = None
        self._answered = 0
        self._ended = asyncio.Event()

    async def start(self, sandbox: Sandbox) -> str:
        """Start the server. Raises RuntimeError with its output if it does not start."""
        process = await sandbox.launch(self._command(sandbox), self._variables(sandbox))
        url = await _address(process)
        outside = sandbox.address(int(url.rpartition(":")[2]))
        client = CommandClient(sandbox, url, self._key) if outside is None else AsyncClient(outside, self._key)
        return await self.connect(url, client)

    async def connect(self, url: str, client: AsyncClient | CommandClient) -> str:
        """Use a running mailbox server: the agent reaches it at `url`, this program by `client`.

        Returns the address of a new session on it.
        """
        self._client = client
        session = await client.run(operations.start("agent", {}))
        self._session_id = session["session_id"]
        return f"{url}{urlsplit(session['base_url']).path}"

    async def watch_agent(self, agent: SandboxProcess) -> None:
        await agent.wait()
        self._ended.set()

    async def anti_call_llm(self, index: int, response_payload: str | None = None) -> str:
        client = self._client
        if client is None:
            raise InvalidRequest("the model service has not been started")
        if response_payload is not None and index > self._answered:
            await self._answer(client, json.loads(response_payload))
            self._answered = index
        self._letter = None
        while self._letter is None:
            if self._ended.is_set():
                return SESSION_END
            self._letter = await self._next(client)
        return json.dumps(chat_request(self._letter), ensure_ascii=False)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    def _command(self, sandbox: Sandbox) -> list[str]:
        program = [sys.executable, "-m", "tokengrove"] if sandbox.local else ["tokengrove"]
        flags = {
            "--engine": "mailbox",
            "--port": 0 if sandbox.local else self._port,
            "--max-context-tokens": _CONTEXT,
            "--engine-timeout-s": _PATIENCE_S,
            "--log-level": "warning",
        }
        return [*program, "serve", *(str(word) for flag in flags.items() for word in flag)]

    def _variables(self, sandbox: Sandbox) -> dict[str, str]:
        return {
            "TOKENGROVE_ADMIN_KEY": self._key,  # the agent only sends requests, and cannot answer them
            "TOKENGROVE_DATABASE_URL": f"sqlite:///{sandbox.scratch_folder}/model-service.db",
            **(_variables_here() if sandbox.local else {}),
        }

    async def _next(self, client: AsyncClient | CommandClient) -> Mapping[str, Any] | None:
        """The next request; None if none arrives for a while, or the agent ends."""
        fetching = asyncio.ensure_future(client.run(operations.next_request(self._session_id, _POLL_S)))
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((fetching, ending), return_when=asyncio.FIRST_COMPLETED)
            if not fetching.done():
                return None
            letter = fetching.result()
            return letter if letter["status"] == "request" else None
        finally:
            for task in (fetching, ending):
                task.cancel()
            await asyncio.gather(fetching, ending, return_exceptions=True)

    async def _answer(self, client: AsyncClient | CommandClient, payload: Mapping[str, Any]) -> None:
        """Deliver the answer to the last request, unless it is delivered already or nobody waits for it."""
        if self._letter is None:
            return
        name = self._letter["interaction_id"]
        try:
            try:
                await _deliver(client, name, payload)
            except InvalidRequest as error:
                if error.param == "interaction_id":
                    raise
                told = f"the answer cannot be forwarded: {error.message}"
                await client.run(operations.deliver({"interaction_id": name, "error": told}))
        except NotFound:
            _log.warning("the agent disconnected before the answer to its request arrived")
        except InvalidRequest as error:
            _log.debug("%s", error)


async def _deliver(client: AsyncClient | CommandClient, name: str, payload: Mapping[str, Any]) -> None:
    error = payload.get("error")
    answer: Delivery = {"response": payload} if error is None else {"error": error}
    await client.run(operations.deliver({"interaction_id": name, **answer}))


def chat_request(letter: Mapping[str, Any]) -> dict[str, Any]:
    """A request of the mailbox as the body of a chat completion, with exactly the agent's fields."""
    request: dict[str, Any] = {"model": letter["model"], "messages": list(letter["messages"]), **letter["asked"]}
    if letter["tools"]:
        request["tools"] = letter["tools"]
        request["tool_choice"] = _choice(**letter["tool_choice"])
    if letter["prefill"] is not None:
        request["messages"].append({"role": "assistant", "content": letter["prefill"]})
        request |= {"continue_final_message": True, "add_generation_prompt": False}
    return request


def _choice(mode: str, name: str | None) -> Any:
    return mode if name is None else {"type": "function", "function": {"name": name}}


def _variables_here() -> dict[str, str]:
    """The variables that the interpreter of this process needs to run this package there; without keys."""
    names = ("HOME", "XDG_CACHE_HOME")
    folders = {name: os.environ[name] for name in names if name in os.environ}
    return {**folders, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


async def _address(process: SandboxProcess) -> str:
    """The address in a server's output at which it listens."""
    while (found := _LISTENING.search(process.output)) is None:
        if process.ended:
            raise RuntimeError(f"the model service did not start: {process.output.strip()}")
        await asyncio.sleep(_LOOK_S)
    return found[1]
