"""The tools of a run, from a YAML file in verl's format and from a Python file with decorated functions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.config import Config
from tokengrove.rollout.imports import load
from tokengrove.verl.tools.function_tools import load_function_tools_from_path
from tokengrove.verl.tools.schemas import OpenAIFunctionToolSchema

_FIELDS = ("class_name", "config", "tool_schema")
_log = logging.getLogger(__name__)


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """Create the tools of a YAML file: `tools`, a list of {class_name, config: {type: native, ...}, tool_schema}.

    A class is called with `config` and `tool_schema` (None if the entry has none). Texts may contain the interpolations
    of `Config`, such as `${oc.env:NAME}`. Raises InvalidRequest with the file, the entry and the field.
    """
    return [
        _made(entry, f"{tools_config_file}: tools[{index}]") for index, entry in enumerate(_entries(tools_config_file))
    ]


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """The tools of both files; either may be None. Raises InvalidRequest if two tools have the same name."""
    tools = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    tools += load_function_tools_from_path(function_tool_path) if function_tool_path else []
    return distinct(tools)


def distinct(tools: list[Any]) -> list[Any]:
    """The tools. Raises InvalidRequest if two have the same name, since calls name their tool."""
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRequest(f"two tools have the name {', '.join(twice)}: rename one, in the YAML or the decorator")
    return tools


def _entries(path: str) -> list[Any]:
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise InvalidRequest(f"'tool_config_path': {error}", param="tool_config_path") from None
    except yaml.YAMLError as error:
        raise InvalidRequest(f"{path} is not valid YAML: {error}", param="tool_config_path") from None
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply", param="tool_config_path") from None
    if not isinstance(content, Mapping) or not isinstance(content.get("tools"), list):
        raise InvalidRequest(f"{path} has no list 'tools' of {{class_name, config, tool_schema}}", param="tools")
    try:
        entries: list[Any] = Config(content).to_dict()["tools"]
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error.message}", param="tools") from None
    return entries


def _made(entry: Any, place: str) -> Any:
    if not isinstance(entry, Mapping):
        raise InvalidRequest(f"{place} is not a mapping of class_name, config and tool_schema", param="tools")
    if unknown := [field for field in entry if field not in _FIELDS]:
        _log.warning("%s.%s is ignored: an entry has %s", place, unknown[0], ", ".join(_FIELDS))
    name = _text(entry, "class_name", place)
    config = _config(entry, place)
    schema = _schema(entry, place)
    try:
        kind = load(name)
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}.class_name: {error.message}", param="class_name") from None
    return kind(config=config, tool_schema=schema)


def _text(entry: Mapping[str, Any], field: str, place: str) -> str:
    if not isinstance(entry.get(field), str):
        raise InvalidRequest(f"{place}.{field} must be a text, not {entry.get(field)!r}", param=field)
    return str(entry[field])


def _config(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise InvalidRequest(f"{place}.config must be a mapping, not {config!r}", param="config")
    if config.get("type", "native") != "native":
        raise InvalidRequest(f"{place}.config.type must be 'native', not {config['type']!r}", param="config")
    return dict(config)


def _schema(entry: Mapping[str, Any], place: str) -> OpenAIFunctionToolSchema | None:
    from pydantic import ValidationError

    given = entry.get("tool_schema")
    if given is None:
        return None
    try:
        schema = OpenAIFunctionToolSchema.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(["tool_schema", *map(str, first["loc"])])
        raise InvalidRequest(f"{place}.{field}: {first['msg']}", param=field) from None
    if "parameter" in given["function"]:
        _log.warning("%s.tool_schema.function.parameter is not a field of a function: write 'parameters'", place)
    if "required" in given["function"]:
        _log.warning("%s.tool_schema.function.required is ignored: indent it into 'parameters'", place)
    return schema
