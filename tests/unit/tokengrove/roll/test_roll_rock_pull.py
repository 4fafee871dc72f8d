"""Runners that fetch the requests of an agent in a sandbox and answer them: what is recorded, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.app import build_app
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Script
from proxy.settings import Settings
from tests.support import call_text, default_url, real_server, sampled, says, tiny_renderer
from tokengrove.client import AsyncClient, Client
from tokengrove.roll import EpisodeResult, PullModeRunner
from tokengrove.roll.rock import LocalProcessSandbox, MailboxModelService, Sandbox, rock_agent_runner

pytestmark = pytest.mark.processes

LOOP = """
import json, os, sys, openai
client = openai.OpenAI(max_retries=0)
tool = {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object",
        "properties": {"at": {"type": "string"}}}}}
messages = [{"role": "system", "content": "Act."}, {"role": "user", "content": "Begin."}]
"""
TOOLS = """
for turn in range(3):
    message = client.chat.completions.create(
        model="m", messages=messages, tools=[tool], temperature=0.5, max_tokens=300, stop=["never"]
    ).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        at = json.loads(call.function.arguments)["at"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{at} is empty"})
    if not message.tool_calls:
        messages.append({"role": "user", "content": "Go on."})
print(json.dumps(messages))
"""
ANTHROPIC = """
import anthropic
client = anthropic.Anthropic(max_retries=0)
look = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
messages = [{"role": "user", "content": "Begin."}]
for turn in range(3):
    with client.messages.stream(model="m", max_tokens=300, system="Act.", messages=messages, tools=[look]) as stream:
        blocks = stream.get_final_message().content
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in blocks]})
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": "empty"} for b in blocks if b.type == "tool_use"]
    messages.append({"role": "user", "content": results or "Go on."})
"""
STREAMS = """
for turn in range(2):
    stream = client.chat.completions.create(model="m", messages=messages, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in stream if part.choices)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
"""
ERRORS = """
try:
    client.chat.completions.create(model="m", messages=messages)
except openai.BadRequestError as error:
    print(error.code, error.status_code)
    sys.exit(7)
"""


@pytest.fixture(scope="module")
def mailbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("mailbox"), engine="mailbox", max_context_tokens=10_000_000) as url:
        yield url


@contextmanager
def sampling(folder: Path, script: Script) -> Iterator[Client]:
    """The server whose tokens are trained, in this process."""
    engine = ScriptedEngine(script, vocab_size=tiny_renderer().vocab_size)
    settings = Settings(database_url=default_url(folder), migrate=True)
    with Client(app=build_app(settings, engine=engine, renderer=tiny_renderer())) as client:
        yield client


def service_at(url: str) -> Callable[..., MailboxModelService]:
    """A model service that runs already."""

    class Running(MailboxModelService):
        async def start(self, sandbox: Sandbox) -> str:
            return await self.connect(url, AsyncClient(url))

    return Running


def config(folder: Path, program: str, **more: Any) -> dict[str, Any]:
    tasks = folder / "tasks.jsonl"
    tasks.write_text(json.dumps({"instance_id": "task-1"}) + "\n")
    job = {"agents": [{"command": ["python", "-c", LOOP + program]}]}
    return {"config": {"dataset_name": str(tasks), "mode": "traversal", "job_config": job, **more}}


def pulled(folder: Path, client: Client, program: str, kind: type[PullModeRunner] = PullModeRunner, **more: Any) -> Any:
    """Run an episode in a session; return its result, and the tree and the one sample of the session."""
    session = client.start_session("t", **more.pop("options", {}))
    runner = kind(session.base_url, 4, config(folder, program, **more), api_key=session.api_key)
    runner.http_client = client.http_client()
    result = runner.run_job(1)
    session.end()
    tree = client.session_tree(session.session_id)
    return result, tree, client.export(session_id=session.session_id).samples


def trained(sample: Any) -> list[int]:
    ids: list[int] = np.asarray(sample.input_ids)[np.asarray(sample.loss_mask) == 1].tolist()
    return ids


def test_tool_calls_over_several_turns_are_one_sample_of_what_was_sampled(tmp_path: Path, mailbox: str) -> None:
    said = [f"  I look.\n\n{call_text('look', json.dumps({'at': 'the door'}))}", " A door,\nthen. \n", "Done at last."]
    with sampling(tmp_path, says(*said)) as client:
        result, tree, samples = pulled(tmp_path, client, TOOLS, model_service_cls=service_at(mailbox))
        assert result.status == "Finished", result
        (sample,) = samples
        shown = [client.show_turn(tree.session_id, turn, ["messages"]) for turn in range(3)]
    assert trained(sample) == [token for text in said for token in sampled(text)]
    assert [turn["sampling"] for turn in shown] == [{"temperature": 0.5, "max_tokens": 300, "stop": ["never"]}] * 3
    assert shown[1]["messages"][-1]["content"] == "the door is empty"


def test_an_agent_of_another_api_is_recorded_to_the_token(tmp_path: Path, mailbox: str) -> None:
    said = [f"I look. {call_text('look', json.dumps({'at': 'é'}))}", "<think>\nhm\n</think>\n\nSo </think>  ", "Third"]
    with sampling(tmp_path, says(*said)) as client:
        result, _, samples = pulled(tmp_path, client, ANTHROPIC, model_service_cls=service_at(mailbox))
        assert result.status == "Finished", result
    assert [trained(sample) for sample in samples] == [[token for text in said for token in sampled(text)]]


class Unreachable(LocalProcessSandbox):
    """Into which nothing leads but commands and files."""

    def address(self, port: int) -> None:
        return None


@pytest.mark.parametrize("place", [LocalProcessSandbox, Unreachable])
def test_a_streaming_agent_is_served_by_a_process_in_its_sandbox(tmp_path: Path, place: type[Sandbox]) -> None:
    with sampling(tmp_path, says("one", "two")) as client:
        result, _, samples = pulled(tmp_path, client, STREAMS, sandbox_cls=place)
        assert (result.status, result.metrics["exit_code"]) == ("Finished", 0), result
    assert [trained(sample) for sample in samples] == [[*sampled("one"), *sampled("two")]]
    assert result.metrics["agent_setup_time_ratio"] > 0


def test_an_error_of_the_server_reaches_the_agent_as_that_error(tmp_path: Path, mailbox: str) -> None:
    with sampling(tmp_path, says("never")) as client:
        limits = {"limits": {"max_context_tokens": 5}}
        result, _, samples = pulled(tmp_path, client, ERRORS, model_service_cls=service_at(mailbox), options=limits)
    assert (result.status, result.metrics["exit_code"], samples) == ("Failed", 7, [])
    assert "context_length_exceeded 400" in result.agent_exit_reason


class Tape:
    """A model service of another kind: it plays requests, and is asked by plain functions, as ROLL's names them."""

    played: list[Any]
    answers: list[Any]
    over: Path
    """A pipe that the agent reads until the tape is over."""

    def __init__(self, port: int) -> None:
        self.port, self.ended, self.pid = port, asyncio.Event(), ""
        type(self).answers = []

    def start(self, sandbox: Sandbox) -> str:
        return "http://127.0.0.1:1/v1"

    async def watch_agent(self, pid: str) -> None:
        self.pid = pid

    def anti_call_llm(self, index: int, response_payload: str | None = None) -> str:
        if response_payload is not None and len(self.answers) < index:
            self.answers.append(json.loads(response_payload))
        said = self.played.pop(0)
        if isinstance(said, Exception):
            raise said
        if not self.played:
            self.over.write_text("")
        return said if isinstance(said, str) else json.dumps(said)

    def close(self) -> None:
        raise RuntimeError("there is nothing to close")  # which costs the job nothing


def test_another_model_service_is_polled_tried_three_times_and_told_of_bad_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(rock_agent_runner, "sleep", sleep)
    ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    with sampling(tmp_path, says("one")) as client:
        Tape.played = [ConnectionError("a"), ConnectionError("b"), "", ask, "no json", " SESSION_END\n"]
        Tape.over = tmp_path / "over"
        os.mkfifo(Tape.over)
        result, tree, _ = pulled(tmp_path, client, f"open({str(Tape.over)!r}).read()", model_service_cls=Tape)
        assert result.status == "Finished", result
        assert [answer.get("error", {}).get("code") for answer in Tape.answers] == [None, "invalid_request"]
        assert Tape.answers[0]["choices"][0]["message"]["content"] == "one"
        assert (len(tree.interactions), pauses[:2]) == (1, [1.0, 2.0])

        Tape.played = [ConnectionError("a"), ConnectionError("b"), ConnectionError("c")]
        failed, _, _ = pulled(tmp_path, client, "import time; time.sleep(600)", model_service_cls=Tape)
    assert (failed.status, failed.agent_exit_reason) == ("Failed", "ConnectionError: c")


def test_an_agent_that_waits_for_an_answer_when_its_time_is_over_is_a_timeout(tmp_path: Path, mailbox: str) -> None:
    class Silent(PullModeRunner):
        async def _response_to(self, raw: str, http_client: Any) -> dict[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

    with sampling(tmp_path, says("never")) as client:
        more = {"model_service_cls": service_at(mailbox), "task_timeout_sec": 1.5}
        result, tree, _ = pulled(tmp_path, client, TOOLS, Silent, **more)
    assert (result.status, tree.interactions) == ("Timeout", ())


def test_a_llm_request_as_roll_has_it_gets_the_conversation_alone(tmp_path: Path, mailbox: str) -> None:
    class Own(PullModeRunner):
        asked: list[Any]

        def _llm_request(  # type: ignore[override]
            self, client: Any, messages: Any, tools: Any = None, tool_choice: Any = "auto"
        ) -> dict[str, Any]:
            self.asked = [*getattr(self, "asked", []), (len(messages), len(tools or []), tool_choice)]
            message = {"role": "assistant", "content": f"answer {len(self.asked)}"}
            return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

    runner = Own("http://nowhere", 4, config(tmp_path, TOOLS, model_service_cls=service_at(mailbox)))
    result: EpisodeResult = runner.run_job(1)
    assert result.status == "Finished", result
    assert runner.asked == [(2, 1, "auto"), (4, 1, "auto"), (6, 1, "auto")]
