"""A tool with a life cycle, with verl's names: for each call an instance is created, executed and always released."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from tokengrove.errors import InvalidRequest
from tokengrove.verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class BaseTool:
    """Base class of tools. Each method may be blocking instead of async; it then runs in a thread.

    `config`: the mapping `config` of the YAML entry. `tool_schema`: an OpenAIFunctionToolSchema, also verl's, or a
    mapping of the same shape; None: the result of `get_openai_tool_schema`. Raises InvalidRequest if there is none.
    """

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None
    ) -> None:
        self.config = config
        self.tool_schema = self._given(tool_schema)
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The tool's schema; override it in a tool that defines its own."""
        schema: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        if schema is None:
            name = type(self).__name__
            raise InvalidRequest(f"{name} has no 'tool_schema': set one, or override get_openai_tool_schema()")
        return schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an instance for one call; return its id (or the id alone) and a response, which the loop ignores.

        `kwargs`: the sample's `tools_kwargs[name]["create_kwargs"]`, each by its name, and all as `create_kwargs`.
        """
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse | str, float | None, dict[str, Any]]:
        """Run the tool; return its response, the reward of this call (or None) and its metrics.

        `parameters`: the arguments that the model wrote. `kwargs`: the sample's `execute_kwargs`, and `agent_data`, the
        state of the loop (AgentData). An exception becomes a tool message, or ends the loop (`on_tool_error`).
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the instance. Called if the sample has `calc_reward_kwargs` for the tool."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the instance; called for every created instance. `kwargs`: the sample's `release_kwargs`."""

    def _given(self, schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None) -> OpenAIFunctionToolSchema:
        if isinstance(schema, Mapping):
            return OpenAIFunctionToolSchema.model_validate(schema)
        return schema or self.get_openai_tool_schema()
