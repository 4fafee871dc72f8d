"""Schemas, calls and responses of tools, with verl's names. A schema keeps every JSON Schema keyword that it is given.
verl's own keeps only type, description and enum, so its prompts lack, for example, the items of an array.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class OpenAIFunctionPropertySchema(BaseModel):
    """The JSON Schema of one parameter."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The JSON Schema of all parameters: an object."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function as it is described to the model."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool. `model_dump(exclude_unset=True, exclude_none=True)` returns it in the format of a request's `tools`."""

    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as the model wrote it. `arguments`: JSON text, possibly invalid."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with decoded arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Decode the arguments. Returns the call, and whether they are not a JSON object; then the call has none."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except (json.JSONDecodeError, RecursionError):
            arguments = None
        is_object = isinstance(arguments, dict)
        call = OpenAIFunctionCallSchema(name=parsed_schema.name, arguments=arguments if is_object else {})
        return call, not is_object


class ToolResponse(BaseModel):
    """The response of a tool. Images and videos are lists. Raises pydantic's ValueError for other types."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video
