"""Tools that agents call in their texts, by name, and the wrapper that answers the calls before an environment."""

from tokengrove.roll.runners.tools.mcp_tool import MCPTool
from tokengrove.roll.runners.tools.python_code_tool import PythonCodeTool
from tokengrove.roll.runners.tools.registration import make_tool, print_tools, register_tools
from tokengrove.roll.runners.tools.tool_env_wrapper import ToolEnvWrapper, tool_wrapper

__all__ = ["MCPTool", "PythonCodeTool", "ToolEnvWrapper", "make_tool", "print_tools", "register_tools", "tool_wrapper"]
