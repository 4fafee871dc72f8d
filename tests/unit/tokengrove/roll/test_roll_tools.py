"""Tools in an agent's texts: Python code with limits, tools by name, and the wrapper in front of an environment."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import shutil
import sys
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.roll import (
    MCPTool,
    PythonCodeTool,
    ToolEnvWrapper,
    make_tool,
    print_tools,
    register_tools,
    tool_wrapper,
)

ENDLESS = "while True: pass"


class Echo:
    """A tool for texts that begin with its mark; a `bad` call fails."""

    tool_type = "echo"

    def __init__(self, mark: str = "!") -> None:
        self.mark, self.closed = mark, False

    def instruction_string(self) -> str:
        return f"Begin with {self.mark}."

    def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
        return action.startswith(self.mark), "bad" in action, f"echo {action}", action[:3]

    def close(self) -> None:
        self.closed = True


class Quiz:
    """One answer ends it. `lives` is the environment's own, and `closed` says whether it was closed."""

    lives, closed = 3, False

    def reset(self, seed: int | None = None) -> tuple[str | None, dict[str, Any]]:
        return (None if seed == 404 else f"question {seed}"), {"env_instruction": "answer"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        modes = {"right": "last"}
        return "over", 1.0, True, False, {"metrics": {"right": action == "4"}, "metrics_agg_mode": modes}

    def get_state(self) -> dict[str, Any]:
        return {"asked": 1}

    def set_state(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]

    def close(self) -> None:
        self.closed = True


def test_code_is_run_and_its_output_is_the_observation() -> None:
    found, failed, observation, parsed = PythonCodeTool().execute_action("I compute. <code>print(6 * 7)</code> Then")
    assert (found, failed, observation) == (True, False, "Code execution result: 42\n\n")
    assert parsed == "I compute. <code>print(6 * 7)</code>"


def test_the_piece_of_code_that_ends_first_is_run() -> None:
    text = "```python\nprint('a block')\n```\n<code>print('a tag')</code>"
    assert "a block" in PythonCodeTool().execute_action(text)[2]
    only_tags = PythonCodeTool(patterns=[r"<py>(.*?)</py>"], tool_instruction="Use py.")
    assert only_tags.execute_action(text)[0] is False
    assert only_tags.instruction_string() == "Use py."
    assert "own" in only_tags.execute_action("<py>print('own')</py>")[2]


@pytest.mark.parametrize("code", ["1 / 0", "x = 1", "import sys; print('said'); sys.exit(3)"])
def test_code_that_fails_or_prints_nothing_is_a_failed_call(code: str) -> None:
    found, failed, _, _ = PythonCodeTool().execute_action(f"<code>{code}</code>")
    assert (found, failed) == (True, True)


def test_an_error_is_shown_whole_or_by_its_last_line() -> None:
    text = "<code>print('so far')\nnumber = 1 / 0</code>"
    whole = PythonCodeTool().execute_action(text)[2]
    assert "so far" in whole and "number = 1 / 0" in whole and "ZeroDivisionError: division by zero" in whole
    last = PythonCodeTool(keep_error_last_line=True).execute_action(text)[2]
    assert last == "Code execution result: so far\n\nZeroDivisionError: division by zero\n"


def test_a_program_that_takes_too_long_is_killed_with_all_that_it_started() -> None:
    start = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    code = f"import subprocess, sys; child = {start}; "
    found, failed, observation, _ = PythonCodeTool(timeout=2).execute_action(
        f"<code>{code}print(child.pid, flush=True)\n{ENDLESS}</code>"
    )
    assert (found, failed) == (True, True)
    assert "stopped: its time of 2 seconds was over" in observation
    child = observation.removeprefix("Code execution result: ").split()[0]
    with suppress(ProcessLookupError):  # it is gone already
        ended = os.pidfd_open(int(child))
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)


def test_a_program_gets_no_secrets_and_no_folder_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "of the trainer")
    code = "import os; print('SECRET_KEY' in os.environ, sorted(os.listdir('.')))"
    assert "False ['program.py']" in PythonCodeTool().execute_action(f"<code>{code}</code>")[2]


def test_a_long_output_is_shortened_and_a_huge_one_stopped() -> None:
    shown = PythonCodeTool().execute_action("<code>print('a' * 50_000 + 'b' * 50_000)</code>")[2]
    assert len(shown) < 21_000 and "aaa" in shown and shown.endswith("bbb\n\n")
    huge = PythonCodeTool(timeout=60).execute_action("<code>while True: print('x' * 10**7)</code>")
    assert huge[1] is True and len(huge[2]) < 21_000


def test_code_that_is_no_unicode_runs() -> None:
    shown = PythonCodeTool().execute_action("<code>print(len('\udc80'), 'é')</code>")[2]
    assert shown == "Code execution result: 1 é\n\n"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_code_in_bubblewrap_reaches_no_network_and_no_file_of_ours() -> None:
    code = f"import os, socket; print(os.path.exists({__file__!r}), os.listdir('.')); "
    code += "socket.create_connection(('192.0.2.1', 80), 1)"
    shown = PythonCodeTool(sandbox_type="bwrap").execute_action(f"<code>{code}</code>")[2]
    assert "False ['program.py']" in shown and "OSError" in shown


def test_an_unknown_sandbox_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="none or bwrap, not 'docker'"):
        PythonCodeTool(sandbox_type="docker")  # type: ignore[arg-type]


def test_tools_are_made_by_name_with_the_arguments_of_their_registration(capsys: pytest.CaptureFixture[str]) -> None:
    register_tools("test_echo", f"{__name__}:Echo", mark="#")
    register_tools(tool_id="test_echo_class", entry_point=Echo)
    assert make_tool("test_echo").mark == "#"
    assert make_tool(tool_id="test_echo", mark="$").mark == "$"
    assert make_tool("test_echo_class").mark == "!"
    register_tools("test_of_roll", "roll.pipeline.agentic.tools.python_code_tool:PythonCodeTool", timeout=3)
    assert make_tool("test_of_roll").timeout == 3
    assert make_tool("python_code", timeout=2).timeout == 2
    with pytest.raises(ValueError, match="there is a tool 'test_echo' already"):
        register_tools("test_echo", Echo)
    with pytest.raises(InvalidRequest, match="no tool 'nothing'; known are python_code, mcp, search, test_echo"):
        make_tool("nothing")
    print_tools()
    assert f"test_echo: {__name__}:Echo, {{'mark': '#'}}\n" in capsys.readouterr().out


def test_calls_are_answered_and_other_texts_go_to_the_environment() -> None:
    env = ToolEnvWrapper(Quiz(), [Echo()], tool_reward=0.5, tool_success_reward=0.25)
    observation, info = env.reset(seed=7)
    assert observation == "question 7\nBegin with !."
    assert info["env_instruction"] == "answer"
    assert info["metrics"] == {"tool_use_counter": 0, "tool_success_counter": 0}

    observation, reward, terminated, truncated, info = env.step("!hello")
    assert (observation, reward, terminated, truncated) == ("echo !hello", 0.75, False, False)
    assert (info["tool_type"], info["parsed_action"], info["use_tool"]) == ("echo", "!he", True)

    observation, reward, *_, info = env.step("!bad")
    assert (reward, info["metrics"]) == (0.5, {"tool_use_counter": 2, "tool_success_counter": 1})

    observation, reward, terminated, _, info = env.step("4")
    assert (observation, reward, terminated, info["use_tool"]) == ("over", 1.0, True, False)
    assert info["metrics"] == {"tool_use_counter": 2, "tool_success_counter": 1, "right": True}
    assert set(info["metrics_agg_mode"].values()) == {"last"}
    assert env.reset(seed=1)[1]["metrics"]["tool_use_counter"] == 0


def test_after_the_last_call_texts_go_to_the_environment() -> None:
    env = ToolEnvWrapper(Quiz(), [Echo()], max_tool_uses=1)
    env.reset(seed=1)
    assert "No further tool call is possible" in env.step("!one")[0]
    assert env.step("!two")[0] == "over"


def test_of_several_tools_the_one_that_succeeds_answers() -> None:
    env = ToolEnvWrapper(Quiz(), [Echo("!"), Echo("!?"), Echo("!!")])
    assert env.reset(seed=1)[0] == "question 1\nAvailable tools:\nBegin with !.\nBegin with !?.\nBegin with !!."
    failed = env.step("!bad")
    assert (failed[0], failed[4]["metrics"]["tool_success_counter"]) == ("echo !bad", 0)


def test_the_wrapper_is_the_environment_for_all_else() -> None:
    quiz, echo = Quiz(), Echo()
    env = ToolEnvWrapper(quiz, [echo])
    assert env.lives == 3 and env.unwrapped is quiz
    assert env.reset(seed=404)[0] is None
    env.reset(seed=1)
    env.step("!one")
    state = env.get_state()
    env.reset(seed=2)
    env.set_state(state)
    assert (env.tool_use_counter, quiz.asked) == (1, 1)
    env.close()
    assert quiz.closed and echo.closed


def test_an_environment_that_is_not_of_texts_is_refused() -> None:
    class Messages(Quiz):
        def reset(self, seed: int | None = None) -> Any:
            return [{"role": "user", "content": "hi"}], {}

    with pytest.raises(InvalidRequest, match="tool_wrapper needs an environment whose observations are texts"):
        ToolEnvWrapper(Messages(), [Echo()]).reset(seed=1)


def test_the_wrapper_is_made_from_a_configuration() -> None:
    pytest.importorskip("gem")
    handlers = logging.getLogger().handlers[:]
    env = tool_wrapper(
        Quiz(),
        wrapper_args={"tool_reward": 0, "max_tool_uses": None},
        tool_configs=[{"tool_id": "python_code", "tool_args": {"timeout": 3}}, {"tool_id": "search"}],
    )
    assert [tool.tool_type for tool in env.tools] == ["python_code", "search"]
    assert env.tools[0].timeout == 3 and env.max_tool_uses == float("inf")
    assert logging.getLogger().handlers == handlers  # which gem would set up


class Server:
    """As a client of fastmcp: `async with`, `list_tools`, `call_tool`. It counts its connections."""

    def __init__(self) -> None:
        self.entered = self.left = 0
        self.gone = threading.Event()

    async def __aenter__(self) -> Server:
        self.entered += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.left += 1
        self.gone.set()

    async def list_tools(self) -> list[Any]:
        add = SimpleNamespace(name="add", description="adds", inputSchema={"type": "object"})
        return [add, SimpleNamespace(name="hang", description=None, inputSchema=None)]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == "hang":
            await asyncio.Event().wait()
        if "a" not in arguments:
            raise LookupError("a is missing")
        parts = [SimpleNamespace(text=str(sum(arguments.values()))), SimpleNamespace(text="sums")]
        return SimpleNamespace(content=parts, is_error=False)


def called(tool: MCPTool, call: str) -> tuple[bool, bool, str, str]:
    return tool.execute_action(f"I call <tool_call>{call}</tool_call> now")


def test_a_tool_of_an_mcp_server_is_called_over_one_connection() -> None:
    server = Server()
    tool = make_tool("mcp", client=server)
    assert '{"name": "add", "description": "adds", "parameters": {"type": "object"}}' in tool.instruction_string()
    found, failed, observation, parsed = called(tool, '{"tool_name": "add", "tool_params": {"a": 2, "b": 3}}')
    assert (found, failed, observation) == (True, False, "5\nsums")
    assert parsed.startswith("I call ") and parsed.endswith("</tool_call>")
    assert called(tool, '{"name": "add", "arguments": {"a": 1}}')[2] == "1\nsums"
    assert tool.execute_action("nothing to call")[:2] == (False, True)
    assert (server.entered, server.left) == (1, 0)
    tool.close()
    assert server.gone.wait(60) and server.left == 1
    assert called(tool, '{"name": "add", "arguments": {"a": 1}}')[1] is False
    tool.close()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("{", "not JSON"),
        ("[]", "a call is a JSON object"),
        ('{"tool_name": 3}', "tool_name (a text)"),
        ('{"tool_name": "other"}', "there is no tool 'other'; there are add, hang"),
        ('{"tool_name": "add"}', "a is missing"),
    ],
)
def test_a_call_that_fails_says_why(call: str, said: str) -> None:
    tool = MCPTool(client=Server())
    found, failed, observation, _ = called(tool, call)
    assert (found, failed) == (True, True) and said in observation
    tool.close()


def test_a_call_of_an_mcp_server_has_a_time() -> None:
    tool = MCPTool(client=Server(), timeout=0.05, custom_prompt="Call hang.")
    assert tool.instruction_string() == "Call hang."
    assert "longer than 0.05 seconds" in called(tool, '{"tool_name": "hang"}')[2]
    tool.close()


def test_only_some_tools_of_an_mcp_server_are_shown_and_called() -> None:
    tool = MCPTool(client=Server(), tool_names_subset=["hang"])
    assert '"add"' not in tool.instruction_string()
    assert "there is no tool 'add'" in called(tool, '{"tool_name": "add"}')[2]
    tool.close()


def test_an_mcp_server_by_its_address_needs_fastmcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastmcp", None)
    with pytest.raises(InvalidRequest, match="pip install fastmcp"):
        make_tool("mcp", server_url="http://127.0.0.1:1/mcp")


def test_an_mcp_server_that_cannot_be_reached_is_an_error_at_the_start() -> None:
    class Closed(Server):
        async def __aenter__(self) -> Server:
            raise ConnectionRefusedError("nobody listens")

    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        MCPTool(client=Closed()).instruction_string()
    with pytest.raises(InvalidRequest, match="needs the server_url"):
        MCPTool()
