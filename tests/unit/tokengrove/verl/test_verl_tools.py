"""Tools in verl's shape: schemas, YAML files, decorated functions, and the life cycle of a call."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from tokengrove.errors import InvalidRequest
from tokengrove.verl.tools import (
    FUNCTION_TOOL_REGISTRY,
    BaseTool,
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_tool,
    get_function_tool,
    initialize_tools_from_config,
    load_all_tools,
    load_function_tools_from_path,
    normalize_function_tool_return,
)
from tokengrove.verl.tools.tool_use import use_tool

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "integer"}, "description": "what to add"}},
            "required": ["numbers"],
        },
    },
}


class Adding(BaseTool):
    """Notes the steps of its life, and fails or hangs where it is told."""

    def __init__(self, config: dict[str, Any] | None = None, tool_schema: Any = None) -> None:
        super().__init__(config or {}, tool_schema or SCHEMA)
        self.steps: list[Any] = []
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        await self._step("create", kwargs)
        return self.config.get("created", "one")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        await self._step("execute", instance_id, parameters, kwargs)
        return str(sum(parameters["numbers"])), 0.5, {"sums": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        await self._step("calc_reward", instance_id, kwargs)
        return 2.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._step("release", instance_id, kwargs)

    async def _step(self, name: str, *given: Any) -> None:
        self.steps.append((name, *given))
        if self.config.get("fails") == name:
            raise RuntimeError(f"{name} fails")
        if self.config.get("hangs") == name:
            self.reached.set()
            await self.go_on.wait()

    @property
    def names(self) -> list[str]:
        return [step[0] for step in self.steps]


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    kept = dict(FUNCTION_TOOL_REGISTRY)
    FUNCTION_TOOL_REGISTRY.clear()
    yield
    FUNCTION_TOOL_REGISTRY.clear()
    FUNCTION_TOOL_REGISTRY.update(kept)


async def test_an_instance_is_created_executed_and_released_with_the_arguments_of_the_sample() -> None:
    tool, data = Adding(), object()
    kwargs = {"create_kwargs": {"truth": 3}, "execute_kwargs": {"unit": "m"}, "release_kwargs": {"soon": True}}
    result = await use_tool(tool, {"numbers": [1, 2]}, kwargs, data)
    assert tool.steps == [
        ("create", {"truth": 3, "create_kwargs": {"truth": 3}}),
        ("execute", "one", {"numbers": [1, 2]}, {"unit": "m", "agent_data": data}),
        ("release", "one", {"soon": True}),
    ]
    assert (result.response.text, result.reward, result.metrics, result.score) == ("3", 0.5, {"sums": 1}, None)


async def test_the_reward_of_the_instance_is_calculated_where_the_sample_asks_for_it() -> None:
    tool = Adding()
    result = await use_tool(tool, {"numbers": []}, {"calc_reward_kwargs": {"scale": 2}}, None)
    assert tool.steps[2] == ("calc_reward", "one", {"scale": 2})
    assert result.score == 2.0


@pytest.mark.parametrize("created", ["one", ("one", ToolResponse())])
async def test_create_returns_an_id_or_a_pair(created: Any) -> None:
    tool = Adding({"created": created})
    await use_tool(tool, {"numbers": []}, {}, None)
    assert tool.steps[1][1] == "one"


@pytest.mark.parametrize("fails", ["execute", "calc_reward"])
async def test_an_instance_is_released_after_an_error(fails: str) -> None:
    tool = Adding({"fails": fails})
    with pytest.raises(RuntimeError, match=f"{fails} fails"):
        await use_tool(tool, {"numbers": []}, {"calc_reward_kwargs": {}}, None)
    assert tool.names[-1] == "release"


async def test_what_was_not_created_is_not_released() -> None:
    tool = Adding({"fails": "create"})
    with pytest.raises(RuntimeError, match="create fails"):
        await use_tool(tool, {}, {}, None)
    assert tool.names == ["create"]


async def test_a_release_that_fails_is_told_and_the_result_stays(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = await use_tool(Adding({"fails": "release"}), {"numbers": [4]}, {}, None)
    assert result.response.text == "4"
    assert "tool add did not release one: RuntimeError: release fails" in caplog.text


@pytest.mark.parametrize("hangs", ["execute", "calc_reward"])
async def test_an_instance_is_released_when_the_call_is_cancelled(hangs: str) -> None:
    tool = Adding({"hangs": hangs})
    call = asyncio.create_task(use_tool(tool, {"numbers": []}, {"calc_reward_kwargs": {}}, None))
    await tool.reached.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert tool.names[-1] == "release"


async def test_a_release_goes_on_when_the_call_is_cancelled_meanwhile() -> None:
    tool = Adding({"hangs": "release"})
    call = asyncio.create_task(use_tool(tool, {"numbers": []}, {}, None))
    await tool.reached.wait()
    call.cancel()
    await asyncio.sleep(0)
    assert not call.done()
    tool.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_cancellation_stops_an_async_create() -> None:
    tool = Adding({"hangs": "create"})
    call = asyncio.create_task(use_tool(tool, {}, {}, None))
    await tool.reached.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert tool.names == ["create"]


class Blocking:
    """A tool of blocking methods, without **kwargs and without a base class."""

    name = "blocking"

    def __init__(self) -> None:
        self.released: list[str] = []
        self.threads: set[int] = set()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.waits = False

    def create(self) -> str:
        self.threads.add(threading.get_ident())
        self.reached.set()
        if self.waits:
            self.go_on.wait()
        return "one"

    def execute(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        self.threads.add(threading.get_ident())
        return {"sum": 3}, None, None

    def release(self, instance_id: str) -> None:
        self.released.append(instance_id)


async def test_blocking_tools_run_in_threads_and_are_given_only_what_they_take() -> None:
    tool = Blocking()
    result = await use_tool(tool, {}, {}, object())
    assert (result.response.text, result.reward, result.metrics) == ('{"sum": 3}', None, {})
    assert tool.released == ["one"]
    assert threading.get_ident() not in tool.threads


async def test_what_a_blocking_create_made_after_a_cancellation_is_released() -> None:
    tool = Blocking()
    tool.waits = True
    call = asyncio.create_task(use_tool(tool, {}, {}, None))
    await asyncio.to_thread(tool.reached.wait)
    call.cancel()
    tool.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert tool.released == ["one"]


class Slow(Blocking):
    """Its call goes on when it is allowed to."""

    def execute(self, instance_id: str, parameters: dict[str, Any]) -> Any:
        self.reached.set()
        self.go_on.wait()
        self.released.append(f"{instance_id} is still in use")
        return "", None, None

    def create(self) -> str:
        return "one"


async def test_a_cancelled_blocking_call_is_released_after_its_end() -> None:
    tool = Slow()
    call = asyncio.create_task(use_tool(tool, {}, {}, None))
    await asyncio.to_thread(tool.reached.wait)
    call.cancel()
    for _ in range(3):  # a release that did not wait would begin and end meanwhile
        await asyncio.to_thread(str)
    tool.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert tool.released == ["one is still in use", "one"]


async def test_functions_are_called_with_the_arguments_and_blocking_ones_in_a_thread() -> None:
    loop_thread = threading.get_ident()

    @function_tool
    def thread(x: int) -> str:
        """Tell the thread.

        Args:
            x: any number
        """
        return f"{x} {threading.get_ident() != loop_thread}"

    @function_tool("renamed")
    async def direct(x: int) -> Any:
        """Tell the thread.

        Args:
            x: any number
        """
        return f"{x} {threading.get_ident() == loop_thread}", 1

    assert (await use_tool(get_function_tool("thread"), {"x": 1}, {}, None)).response.text == "1 True"
    result = await use_tool(get_function_tool("renamed"), {"x": 2}, {"create_kwargs": {"no": "effect"}}, None)
    assert (result.response.text, result.reward) == ("2 True", 1.0)


def test_a_schema_is_read_from_type_hints_and_docstring() -> None:
    @function_tool
    def search(query: str, sites: list[str], mode: Literal["fast", "deep"] = "fast") -> str:
        """Search the web.

        Args:
            query: What to search.
            sites: Where to search.
            mode: How to search.
        """
        return query

    schema = get_function_tool("search").tool_schema.model_dump(exclude_unset=True, exclude_none=True)
    assert schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to search."},
                    "sites": {"type": "array", "items": {"type": "string"}, "description": "Where to search."},
                    "mode": {"type": "string", "enum": ["fast", "deep"], "description": "How to search."},
                },
                "required": ["query", "sites"],
            },
        },
    }
    assert search("a", []) == "a"  # the decorator returns the function


@pytest.mark.parametrize("as_object", [False, True])
def test_a_schema_that_is_given_is_taken_as_it_is(as_object: bool) -> None:
    schema = OpenAIFunctionToolSchema.model_validate(SCHEMA) if as_object else SCHEMA

    @function_tool("add", schema=schema)
    def anything(**arguments: Any) -> str:
        return ""

    assert get_function_tool("add").tool_schema.model_dump(exclude_unset=True, exclude_none=True) == SCHEMA


def test_functions_without_hints_docstring_or_names_are_refused() -> None:
    def unhinted(a, b):  # type: ignore[no-untyped-def]
        """Do."""

    def undocumented(a: int) -> None:
        pass

    def variadic(*a: int) -> None:
        """Do."""

    for function, told in ((unhinted, "type hint"), (undocumented, "docstring"), (variadic, "which have no schema")):
        with pytest.raises(InvalidRequest, match=rf"{function.__name__}.*{told}"):
            function_tool(function)
    assert FUNCTION_TOOL_REGISTRY == {}


def test_a_name_is_registered_once() -> None:
    def first(**given: Any) -> None: ...
    def second(**given: Any) -> None: ...

    function_tool("add", schema=SCHEMA)(first)
    function_tool("add", schema=SCHEMA)(first)
    with pytest.raises(InvalidRequest, match=r"'add' is .*first; .*second needs another name"):
        function_tool("add", schema=SCHEMA)(second)
    with pytest.raises(KeyError, match="function_tool_path"):
        get_function_tool("unknown")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (ToolResponse(text="a"), ("a", 0.0, {})),
        ("a", ("a", 0.0, {})),
        ({"ä": 1}, ('{"ä": 1}', 0.0, {})),
        (7, ("7", 0.0, {})),
        (None, ("None", 0.0, {})),
        (("a",), ("a", 0.0, {})),
        (("a", 1), ("a", 1.0, {})),
        (("a", None), ("a", 0.0, {})),
        (({"b": 2}, 0, {"calls": 1}), ('{"b": 2}', 0.0, {"calls": 1})),
        ((3, 0.5, None), ("3", 0.5, {})),
    ],
)
def test_returned_values_become_response_reward_and_metrics(returned: Any, expected: tuple[str, float, Any]) -> None:
    response, reward, metrics = normalize_function_tool_return(returned)
    assert (response.text, reward, metrics) == expected


@pytest.mark.parametrize("returned", [(), ("a", 1, {}, "more")])
def test_tuples_of_another_length_are_an_error(returned: Any) -> None:
    with pytest.raises(TypeError, match=rf"length {len(returned)}.*write \(response,\)"):
        normalize_function_tool_return(returned)


def test_a_response_has_images_in_a_list() -> None:
    with pytest.raises(ValidationError, match="valid list"):
        ToolResponse(image="picture")  # type: ignore[arg-type]
    assert ToolResponse().is_empty() and not ToolResponse(image=[1]).is_text_only()


@pytest.mark.parametrize(("arguments", "wrong"), [('{"a": 1}', False), ("{", True), ("[1]", True)])
def test_arguments_that_are_no_object_are_told(arguments: str, wrong: bool) -> None:
    parsed = OpenAIFunctionParsedSchema(name="f", arguments=arguments)
    call, told = OpenAIFunctionCallSchema.from_openai_function_parsed_schema(parsed)
    assert (call.arguments, told) == ({} if wrong else {"a": 1}, wrong)


def test_a_tool_without_schema_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="BaseTool has no 'tool_schema'"):
        BaseTool({}, None)


YAML = """
tools:
  - class_name: "tests.unit.tokengrove.verl.test_verl_tools.Adding"
    config:
      type: native
      created: two
    tool_schema:
      type: "function"
      function:
        name: "plus"
        description: "Add numbers."
        parameters:
          type: "object"
          properties:
            numbers:
              type: "array"
              items: {type: integer}
              description: "what to add"
          required: ["numbers"]
"""


def test_tools_are_made_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(YAML)
    [tool] = initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    assert type(tool).__name__ == "Adding"
    assert (tool.name, tool.config) == ("plus", {"type": "native", "created": "two"})
    named = {**SCHEMA, "function": {**SCHEMA["function"], "name": "plus"}}
    assert tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) == named


def test_a_text_may_name_an_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADDER", "three")
    (tmp_path / "tools.yaml").write_text(YAML.replace("created: two", "created: ${oc.env:ADDER}"))
    [tool] = initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    assert tool.config["created"] == "three"


def test_a_tool_may_bring_its_own_schema(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(YAML[: YAML.index("    tool_schema")])
    [tool] = initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    assert tool.name == "add"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("tools:", "tool:", "has no list 'tools'"),
        ("class_name:", "class:", r"tools\[0\]\.class_name must be a text, not None"),
        ("Adding", "Subtracting", r"tools\[0\]\.class_name: .*has no 'Subtracting'"),
        ("type: native", "type: mcp", r"tools\[0\]\.config\.type must be 'native', not 'mcp'"),
        ('        name: "plus"\n', "", r"tools\[0\]\.tool_schema\.function\.name: Field required"),
        ('required: ["numbers"]', "required: 3", r"tools\[0\]\.tool_schema\.function\.parameters\.required: .*list"),
        ('"Add numbers."', '"${no.such.name}"', r"no\.such\.name"),
        ("tools:", "tools: [", "is not valid YAML"),
    ],
)
def test_an_error_names_file_entry_and_field(tmp_path: Path, before: str, after: str, told: str) -> None:
    (tmp_path / "tools.yaml").write_text(YAML.replace(before, after))
    with pytest.raises(InvalidRequest, match=told) as error:
        initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    assert "tools.yaml" in str(error.value)


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"tool_config_path.*nowhere\.yaml"):
        initialize_tools_from_config("nowhere.yaml")
    with pytest.raises(InvalidRequest, match=r"function_tool_path.*nowhere\.py"):
        load_function_tools_from_path("nowhere.py")


def test_required_beside_the_parameters_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tools.yaml").write_text(YAML.replace("          required", "        required"))
    [tool] = initialize_tools_from_config(str(tmp_path / "tools.yaml"))
    assert "function.required is ignored: indent it into 'parameters'" in caplog.text
    assert "required" not in json.dumps(tool.tool_schema.model_dump(exclude_unset=True))


FUNCTIONS = """
from tokengrove.verl.tools import function_tool

@function_tool
def minus(a: int) -> int:
    \"\"\"Subtract.

    Args:
        a: a number
    \"\"\"
    return -a
"""


def test_functions_of_a_file_are_loaded_once_and_collide_with_those_of_the_yaml(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "tools.yaml").write_text(YAML)
    path, config = str(tmp_path / "functions.py"), str(tmp_path / "tools.yaml")
    assert [tool.name for tool in load_all_tools(config, path)] == ["plus", "minus"]
    assert load_function_tools_from_path(path) == load_function_tools_from_path(path) != []
    assert load_all_tools(None, None) == []
    (tmp_path / "tools.yaml").write_text(YAML.replace('"plus"', '"minus"'))
    with pytest.raises(InvalidRequest, match="two tools have the name minus"):
        load_all_tools(config, path)


def test_a_file_may_have_functions_and_a_class_that_the_yaml_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = "from tokengrove.verl.tools import BaseTool\n\n\nclass Plus(BaseTool):\n    pass\n"
    (tmp_path / "both_kinds.py").write_text(FUNCTIONS + classes)
    (tmp_path / "tools.yaml").write_text(re.sub("class_name: .*", "class_name: both_kinds.Plus", YAML))
    monkeypatch.syspath_prepend(tmp_path)
    tools = load_all_tools(str(tmp_path / "tools.yaml"), str(tmp_path / "both_kinds.py"))
    assert [(type(tool).__name__, tool.name) for tool in tools] == [("Plus", "plus"), ("FunctionTool", "minus")]


def test_a_file_that_fails_registers_nothing_and_may_be_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "mended.py"
    file.write_text(FUNCTIONS + "\nraise RuntimeError('half')\n")
    with pytest.raises(RuntimeError, match="half"):
        load_function_tools_from_path(str(file))
    assert FUNCTION_TOOL_REGISTRY == {}
    file.write_text(FUNCTIONS)
    assert [tool.name for tool in load_function_tools_from_path(str(file))] == ["minus"]


def test_a_file_without_functions_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "empty.py").write_text("")
    assert load_function_tools_from_path(str(tmp_path / "empty.py")) == []
    assert "has no function with @function_tool" in caplog.text


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (
            "class_name: collections.OrderedDict, confg: {}",
            "tools[0].confg is ignored: an entry has class_name, config",
        ),
        (
            "class_name: collections.OrderedDict, "
            "tool_schema: {type: function, function: {name: f, description: d, parameter: {}}}",
            "tools[0].tool_schema.function.parameter is not a field of a function: write 'parameters'",
        ),
    ],
)
def test_a_misspelt_field_of_an_entry_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: str, told: str
) -> None:
    (path := tmp_path / "tools.yaml").write_text(f"tools: [{{{entry}}}]")
    initialize_tools_from_config(str(path))
    assert told in caplog.text
