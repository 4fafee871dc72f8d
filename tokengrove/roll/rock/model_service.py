"""A server in the sandbox that the agent calls. Its requests are fetched and answered from outside."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tokengrove.rollout.sandboxes.sandbox import Sandbox, SandboxProcess

SESSION_END = "SESSION_END"
"""The result of `anti_call_llm` after the agent has ended."""


class ModelService(ABC):
    """The runner's interface to the model service. Your own may be any class with the same methods."""

    @abstractmethod
    async def start(self, sandbox: Sandbox) -> str:
        """Start it; return its address for the agent, such as `http://127.0.0.1:28080/v1`."""

    @abstractmethod
    async def watch_agent(self, agent: SandboxProcess) -> None:
        """Wait until the agent has ended; from then on `anti_call_llm` returns SESSION_END."""

    @abstractmethod
    async def anti_call_llm(self, index: int, response_payload: str | None = None) -> str:
        """Answer the last request, and wait for the next.

        `index` is the number of requests answered so far. `response_payload` is the answer to the last of them as JSON:
        a chat completion, or `{"error": {...}}` in OpenAI's format. A repeated call with the same index does not answer
        again. Returns the next request as the JSON of a chat completion's body, "" if none has arrived yet, or
        SESSION_END.
        """

    async def close(self) -> None:  # noqa: B027 - there may be nothing to release
        """Release its resources; its process ends with the sandbox."""
