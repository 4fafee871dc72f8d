"""A server in the sandbox to which the agent talks, and whose requests are fetched and answered from outside."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tokengrove.rollout.sandboxes.sandbox import Sandbox, SandboxProcess

SESSION_END = "SESSION_END"
"""What `anti_call_llm` returns once the agent has ended."""


class ModelService(ABC):
    """The side of the model service that the runner sees. One of your own is a class with the same methods."""

    @abstractmethod
    async def start(self, sandbox: Sandbox) -> str:
        """Start it; return the address under which the agent finds it, as `http://127.0.0.1:28080/v1`."""

    @abstractmethod
    async def watch_agent(self, agent: SandboxProcess) -> None:
        """Wait until the agent has ended; from then on `anti_call_llm` returns SESSION_END."""

    @abstractmethod
    async def anti_call_llm(self, index: int, response_payload: str | None = None) -> str:
        """Answer the last request, and wait for the next.

        `index` is the number of requests answered so far; `response_payload` the answer to the last of them as JSON: a
        chat completion, or `{"error": {...}}` of OpenAI's shape. A call with the same index again answers nothing
        twice. Returns the next request as the JSON of a chat completion's body, "" if none has come yet, or
        SESSION_END.
        """

    async def close(self) -> None:  # noqa: B027 - there may be nothing to let go of
        """Let go of it; its process ends with the sandbox."""
