"""A harness's calls are held until they are answered, in all three APIs; a harness that is dead ends its session."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support import call_text, function_tool, user
from tests.unit.tokengrove.openenv.openenv_play import Servers, both
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.openenv import CommandHarness, CompletionText, HarnessSession, HarnessSessionFactory
from tokengrove.rollout.failures import AgentFailed

__all__ = ["both"]
ADD = function_tool("add", {"a": {"type": "integer"}})
FLAT = {"name": "add", "description": ADD["function"]["description"]}
PARAMETERS = ADD["function"]["parameters"]
REQUESTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": [user("hi")], "tools": [ADD]},
    "responses": {"model": "m", "input": "hi", "tools": [{**FLAT, "parameters": PARAMETERS, "type": "function"}]},
    "messages": {
        "model": "m",
        "max_tokens": 64,
        "messages": [user("hi")],
        "tools": [{**FLAT, "input_schema": PARAMETERS}],
    },
}
CALL = "<think>\nlet me see\n</think>\n\n" + call_text("add", '{"a": 7}')


def started(both: Servers, agent: Any, task: Any = None, **more: Any) -> HarnessSession:
    return HarnessSessionFactory(both.interception, agent, **more).create(task=task, rollout_id="r")


def ended_as(both: Servers, session: HarnessSession) -> tuple[str | None, str | None]:
    tree = both.interception.client.session_tree(session._access.session_id)
    return tree.outcome, tree.extra["exit_reason"]


def asks(path: str, **more: Any) -> Callable[..., Any]:
    """An agent that sends one request and returns the body of its answer."""

    def agent(task: Any, base_url: str, api_key: str, http_client: httpx.Client) -> str:
        headers = {"authorization": f"Bearer {api_key}"}
        answer = http_client.post(f"{base_url}/{path}", json={**REQUESTS[path], **more}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.text

    return agent


@pytest.mark.parametrize("path", REQUESTS)
def test_a_call_is_held_and_answered_with_calls_in_each_api(both: Servers, path: str) -> None:
    session = started(both, asks(path))
    try:
        intercept = session.next_request()
        assert intercept is not None and intercept["messages"] == [user("hi")]
        assert [tool["function"]["name"] for tool in intercept["tools"]] == ["add"]
        assert session.next_request() == intercept, "until it is answered, it is returned again"
        session.deliver(intercept, CALL)
        assert session.next_request() is None
        body = json.loads(session.wait())
    finally:
        session.close()
    if path == "chat/completions":
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], body["choices"][0]["finish_reason"]) == ("let me see", "tool_calls")
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    elif path == "messages":
        assert body["stop_reason"] == "tool_use"
        calls = [(part["name"], json.dumps(part["input"])) for part in body["content"] if part["type"] == "tool_use"]
    else:
        calls = [(item["name"], item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
    assert calls == [("add", '{"a": 7}')]


@pytest.mark.parametrize("path", REQUESTS)
def test_a_streaming_client_gets_a_stream(both: Servers, path: str) -> None:
    session = started(both, asks(path, stream=True))
    try:
        intercept = session.next_request()
        assert intercept is not None
        session.deliver(intercept, "streamed answer")
        assert session.next_request() is None
        text = session.wait()
    finally:
        session.close()
    assert text.startswith(("data: ", "event: ")) and "streamed answer" in text


def test_what_an_agent_asks_for_comes_with_its_call(both: Servers) -> None:
    forced = {"type": "function", "function": {"name": "add"}}
    session = started(both, asks("chat/completions", temperature=0.5, stop=["x"], tool_choice=forced, max_tokens=9))
    try:
        intercept = session.next_request()
        assert intercept is not None
        assert intercept["sampling"] == {"temperature": 0.5, "stop": ["x"], "max_tokens": 9, "tool_choice": forced}
    finally:
        session.close()


def test_the_beginning_of_an_answer_is_the_last_message(both: Servers) -> None:
    begun = [user("hi"), {"role": "assistant", "content": "It is"}]
    session = started(both, asks("messages", messages=begun, tools=[]))
    try:
        intercept = session.next_request()
        assert intercept is not None and intercept["messages"] == begun
        assert intercept["sampling"]["continue_final_message"] is True
        session.deliver(intercept, " so.")
        assert session.next_request() is None
        assert json.loads(session.wait())["content"] == [{"type": "text", "text": " so."}]
    finally:
        session.close()


def test_an_answer_that_was_cut_is_cut_for_the_agent(both: Servers) -> None:
    session = started(both, asks("chat/completions"))
    try:
        intercept, text = session.next_request(), CompletionText("one two")
        text.finish_reason, text.message = "length", {"role": "assistant", "content": "one two"}
        assert intercept is not None
        session.deliver(intercept, text)
        assert session.next_request() is None
        assert json.loads(session.wait())["choices"][0]["finish_reason"] == "length"
    finally:
        session.close()


def test_a_call_is_answered_once(both: Servers) -> None:
    session = started(both, asks("chat/completions"))
    try:
        intercept = session.next_request()
        assert intercept is not None
        session.deliver(intercept, "one")
        with pytest.raises(InvalidRequest, match="answered already"):
            session.deliver(intercept, "two")
    finally:
        session.close()


def test_each_choice_of_a_reply_is_a_call_of_its_own(both: Servers) -> None:
    session = started(both, asks("chat/completions", n=2))
    try:
        for text in ("one", "two"):
            intercept = session.next_request()
            assert intercept is not None and intercept["messages"] == [user("hi")]
            session.deliver(intercept, text)
        assert session.next_request() is None
        choices = json.loads(session.wait())["choices"]
        assert [choice["message"]["content"] for choice in choices] == ["one", "two"]
    finally:
        session.close()


def test_prompts_without_messages_are_refused_and_the_next_call_is_returned(both: Servers) -> None:
    def agent(task: Any, base_url: str, http_client: httpx.Client) -> int:
        refused = http_client.post(f"{base_url}/completions", json={"model": "m", "prompt": "once"})
        http_client.post(f"{base_url}/chat/completions", json=REQUESTS["chat/completions"])
        return refused.status_code

    session = started(both, agent)
    try:
        intercept = session.next_request()
        assert intercept is not None and intercept["messages"] == [user("hi")]
        session.deliver(intercept, "yes")
        assert session.next_request() is None
        assert session.wait() == 502
    finally:
        session.close()


ASKING = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = urllib.request.urlopen(urllib.request.Request(url, body, headers))
    return json.load(answer)["choices"][0]["message"]["content"]
task = json.load(open(os.environ["TASK_FILE"]))
"""


def command(code: str) -> list[str]:
    return [sys.executable, "-c", ASKING + code]


def test_a_command_is_an_agent_and_is_scored_by_its_messages(both: Servers) -> None:
    def verify(task: Any, messages: list[dict[str, Any]]) -> float:
        return float(messages[-1]["content"] == task["wanted"])

    code = "print(ask(task['ask'])); print(ask('again'))"
    session = started(both, command(code), {"ask": "What?", "wanted": "that"}, verify=verify)
    try:
        for text in ("this", "that"):
            intercept = session.next_request()
            assert intercept is not None
            session.deliver(intercept, text)
        assert session.next_request() is None
        assert session.wait().split() == ["this", "that"]
        assert session.verify().env_reward == 1.0
    finally:
        session.close()
    assert ended_as(both, session) == ("Finished", None)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("ask('one'); sys.exit('no more')", "exit code 1: no more"),
        ("ask('one'); os.kill(os.getpid(), 9)", "signal 9"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_command_that_dies_ends_its_session_as_failed(both: Servers, code: str, why: str) -> None:
    session = started(both, command(code), {})
    try:
        while (intercept := session.next_request()) is not None:
            session.deliver(intercept, "yes")
        with pytest.raises(AgentFailed, match=why):
            session.verify()
    finally:
        session.close()
    outcome, reason = ended_as(both, session)
    assert outcome == "Failed" and reason is not None and why in reason


def test_a_program_that_is_not_there_ends_its_session(both: Servers) -> None:
    session = started(both, ["/no/such/program"], {})
    assert session.next_request() is None
    with pytest.raises(FileNotFoundError):
        session.verify()
    session.close()
    assert ended_as(both, session)[0] == "Failed"


def test_a_function_that_raises_while_a_call_waits_ends_its_session(both: Servers) -> None:
    left = threading.Event()

    def agent(task: Any, base_url: str) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{base_url}/chat/completions", json=REQUESTS["chat/completions"], timeout=0.5)
        left.set()
        raise LookupError("gave up")

    session = started(both, agent)
    try:
        intercept = session.next_request()
        assert intercept is not None
        left.wait()
        session.deliver(intercept, "too late")  # nobody is there: nothing happens
        while (intercept := session.next_request()) is not None:
            session.deliver(intercept, "too late")
        with pytest.raises(LookupError, match="gave up"):
            session.verify()
    finally:
        session.close()
    assert ended_as(both, session) == ("Failed", "LookupError: gave up")


def test_closing_ends_a_command_that_would_wait_for_ever(both: Servers) -> None:
    session = started(both, command("open('begun', 'w'); ask('one')"), {})
    assert session.next_request() is not None
    session.close()
    session.close()
    assert session.next_request() is None
    assert ended_as(both, session) == (
        "Failed",
        "AgentFailed: closed: the session was closed before the harness had ended",
    )


def test_sessions_never_get_each_others_answers(both: Servers) -> None:
    sessions = [started(both, asks("chat/completions", messages=[user(str(number))])) for number in range(8)]
    try:
        intercepts = [session.next_request() for session in sessions]
        for session, intercept in reversed(list(zip(sessions, intercepts, strict=True))):
            assert intercept is not None
            session.deliver(intercept, f"answer {intercept['messages'][0]['content']}")
        for number, session in enumerate(sessions):
            assert session.next_request() is None
            assert json.loads(session.wait())["choices"][0]["message"]["content"] == f"answer {number}"
    finally:
        for session in sessions:
            session.close()


def test_the_command_gets_no_key_but_its_own(both: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENGROVE_ADMIN_KEY", "secret-of-the-trainer")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    code = "print(json.dumps(dict(os.environ)))"
    session = started(both, CommandHarness(command(code), {"EXTRA": "1"}), {})
    assert session.next_request() is None
    variables = json.loads(session.wait())
    session.close()
    assert "secret-of-the-trainer" not in variables.values() and "another" not in variables.values()
    assert variables["OPENAI_BASE_URL"].endswith("/v1") and variables["EXTRA"] == "1"


def test_placeholders_of_a_command_stand_for_values_of_its_rollout(both: Servers) -> None:
    words = [
        sys.executable,
        "-c",
        "import sys; print(sys.argv[1:])",
        "{prompt}",
        "{data.level}",
        "{base_url}",
        "{other}",
    ]
    session = started(both, words, {"question": "Why?", "level": 3})
    assert session.next_request() is None
    assert session.wait().strip() == str(["Why?", "3", session._access.base_url, "{other}"])
    session.close()
    with pytest.raises(ConfigurationError, match=r"did you mean \{prompt\}"):
        HarnessSessionFactory(both.interception, ["agent", "{promt}"])
