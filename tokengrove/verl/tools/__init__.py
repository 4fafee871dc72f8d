"""Tools for agent loops, in verl's forms: classes with a life cycle, and decorated functions."""

from tokengrove.verl.tools.base_tool import BaseTool
from tokengrove.verl.tools.function_tools import (
    FUNCTION_TOOL_REGISTRY,
    FunctionTool,
    function_tool,
    get_function_tool,
    load_function_tools_from_path,
    normalize_function_tool_return,
)
from tokengrove.verl.tools.registry import initialize_tools_from_config, load_all_tools
from tokengrove.verl.tools.schemas import (
    OpenAIFunctionCallSchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

__all__ = [
    "FUNCTION_TOOL_REGISTRY",
    "BaseTool",
    "FunctionTool",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "function_tool",
    "get_function_tool",
    "initialize_tools_from_config",
    "load_all_tools",
    "load_function_tools_from_path",
    "normalize_function_tool_return",
]
