"""Servers, environments and harnesses that tests of the OpenEnv contract play with; openenv itself is not needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import real_server
from tokengrove.client import Client
from tokengrove.openenv import InterceptionServer


@dataclass
class Servers:
    """A server that samples (a scripted agent), and one that intercepts."""

    sampling: Client
    interception: InterceptionServer


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        urls = []
        for name, engine, more in (("sampling", "scripted", {"engine_arg": ("play=agent",)}), ("mail", "mailbox", {})):
            (folder / name).mkdir()
            urls.append(stack.enter_context(real_server(folder / name, engine, shutdown_timeout_s=0.0, **more)))
        sampling = stack.enter_context(Client(urls[0]))
        yield Servers(sampling, stack.enter_context(InterceptionServer(urls[1])))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("openenv")) as found:
        yield found


@dataclass
class Result:
    """As openenv's `ToolResult`."""

    data: Any = None
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass
class Score:
    """As openenv's `VerifyResult`."""

    env_reward: float | None


@dataclass
class Adding:
    """An environment with one tool, in the shape of openenv's `ResourceSession`. Its reward is the last sum."""

    task: Any
    seed: int | None = None
    closed: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)

    def initial_messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.task["prompt"]}]

    def list_tools(self) -> list[Any]:
        number = {"type": "integer"}
        schema = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
        return [{"name": "add", "description": "Add two numbers.", "input_schema": schema}]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Result:
        if self.task.get("broken"):
            raise RuntimeError("the environment is gone")
        if name != "add":
            raise KeyError(f"Unknown tool: {name}")
        self.calls.append(arguments)
        return Result(data={"sum": arguments["a"] + arguments["b"]}, done=bool(self.task.get("one_call")))

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> Score:
        self.told = [transcript, final_state]
        return Score(float(sum(self.calls[-1].values())) if self.calls else None)

    def close(self) -> None:
        self.closed += 1


class AddingFactory:
    """In the shape of openenv's `ResourceSessionFactory`; it keeps what it made."""

    def __init__(self) -> None:
        self.made: list[Adding] = []

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> Adding:
        self.made.append(Adding(task, seed))
        return self.made[-1]
