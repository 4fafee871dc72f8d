"""Unmodified agents run on a keyed server, and no key appears in its output, its answers or its database."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.e2e.processes import server_process
from tests.support import JSON

ADMIN = "admin-key-of-this-test"
OPEN_FLAGS = ("--engine", "scripted", "--engine-arg", "play=agent", "--log-level", "debug")
FLAGS = (*OPEN_FLAGS, "--admin-key", ADMIN)


def start(url: str, **body: Any) -> Any:
    response = httpx.post(f"{url}/rl/start_session", json=body, headers={"authorization": f"Bearer {ADMIN}"})
    assert response.status_code == 200, response.text
    return response.json()


async def areal_math_agent(base_url: str) -> str:
    """An agent as in AReaL's documentation: the client takes any key, and the session is in the URL."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="DUMMY")
    async with client:
        completion = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "What is 2 + 2?"}]
        )
    return completion.choices[0].message.content or ""


def agent_of_the_environment() -> str:
    """An agent that is configured only by the environment variables of its SDK."""
    with openai.OpenAI() as client:
        return client.responses.create(model="default", input="What is 2 + 2?").output_text


def claude_agent() -> int:
    with anthropic.Anthropic() as client:
        reply = client.messages.create(model="any", max_tokens=50, messages=[{"role": "user", "content": "hello"}])
    return reply.usage.output_tokens


def test_unmodified_agents_run_on_a_keyed_server_and_leave_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_process(tmp_path, *FLAGS) as process:
        session = start(process.url, task_id="t")
        slot = start(process.url, task_id="slot", api_key="a-chosen-key-of-17")
        assert asyncio.run(areal_math_agent(session["base_url"]))
        monkeypatch.setenv("OPENAI_BASE_URL", session["base_url"])
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        assert agent_of_the_environment()
        monkeypatch.setenv("ANTHROPIC_BASE_URL", session["root_url"])
        monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-any")
        assert claude_agent()
        with openai.OpenAI(base_url=f"{process.url}/v1", api_key="a-chosen-key-of-17") as client:
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": "by key"}])
        by_address = f"{process.url}/~a-chosen-key-of-17"
        with openai.OpenAI(base_url=f"{by_address}/v1", api_key="7") as client:
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": "by address"}])
        answers = [httpx.post(f"{by_address}/{path}", json={}).text for path in ("v1/x", "x", "rl/end_session")]
        answers += everything_that_goes_wrong(process.url, session)
        answers.append(httpx.get(f"{process.url}/metrics").text)
        for path in ("/rl/sessions", f"/rl/sessions/{session['session_id']}"):
            shown = httpx.get(process.url + path, headers={"x-api-key": ADMIN})
            assert shown.status_code == 200
            answers.append(shown.text)
        process.terminate()
        assert process.wait() == 0
    path_secret = session["root_url"].rpartition("~")[2]
    secrets = [
        ADMIN,
        session["api_key"],
        session["control_key"],
        path_secret,
        slot["control_key"],
        "a-chosen-key-of-17",
    ]
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("served.db*"))
    assert b"What is 2 + 2?" in stored  # the search below does see stored text
    assert " turn " in process.output and "What is 2 + 2?" not in process.output
    for secret in secrets:
        assert secret not in process.output
        assert not [answer for answer in answers if secret in answer]
        assert secret.encode() not in stored


def test_a_key_of_another_service_leaves_no_trace_on_an_open_server(tmp_path: Path) -> None:
    secret = "sk-proj-a-real-key-of-another-service"
    with server_process(tmp_path, *OPEN_FLAGS) as process:
        for _ in range(2):
            with openai.OpenAI(base_url=f"{process.url}/v1", api_key=secret) as client:
                client.chat.completions.create(model="x", messages=[{"role": "user", "content": "What is 2 + 2?"}])
            headers = {"authorization": f"Bearer {secret}"}
            answers = [
                httpx.post(f"{process.url}/rl/{end}", json={}, headers=headers) for end in ("mark", "end_session")
            ]
        answers += [
            httpx.post(f"{process.url}/v1/{path}", content=b"{", headers={**JSON, **headers})
            for path in ("messages", "x")
        ]
        shown = httpx.get(f"{process.url}/rl/sessions").json()["sessions"]
        process.terminate()
        assert process.wait() == 0
    assert [entry["status"] for entry in shown] == ["ended", "ended"]
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("served.db*"))
    assert b"What is 2 + 2?" in stored
    for trace in (secret, hashlib.sha256(secret.encode()).hexdigest()):
        assert trace not in process.output and trace.encode() not in stored
        assert not [answer for answer in answers if trace in answer.text]


def everything_that_goes_wrong(url: str, session: Any) -> list[str]:
    """Return the bodies of refusals for every kind of key in every place."""
    root = session["root_url"]
    keys = [ADMIN, session["api_key"], session["control_key"]]
    asked = [(f"{root}{path}", {}) for path in ("/v1/nothing", "/v1/chat/completions", "/rl/rotate_keys", "/nowhere")]
    for key in keys:
        headers = {"authorization": f"Bearer {key}"}
        asked += [(f"{url}{path}", headers) for path in ("/v1/chat/completions", "/rl/start_session", "/nowhere")]
        asked.append((f"{url}/x~{key}/v1/chat/completions", {"authorization": "Bearer x"}))
    return [httpx.post(address, content=b"{broken", headers={**JSON, **headers}).text for address, headers in asked]


def test_a_key_in_the_query_of_googles_api_leaves_no_trace(tmp_path: Path) -> None:
    secret = "a-key-of-google-in-the-address"
    contents = {"contents": [{"role": "user", "parts": [{"text": "What is 2 + 2?"}]}]}
    with server_process(tmp_path, *OPEN_FLAGS) as process:
        answers = []
        for end in ("generateContent", "streamGenerateContent", "countTokens", "embedContent"):
            for body in (contents, {}):
                url = f"{process.url}/v1beta/models/m:{end}?alt=sse&key={secret}"
                answers.append(httpx.post(url, json=body).text)
        answers += [
            httpx.get(f"{process.url}/{path}?key={secret}").text for path in ("v1beta/models", "v1beta/x", "ui")
        ]
        answers += [httpx.get(process.url + path).text for path in ("/rl/sessions", "/metrics")]
        process.terminate()
        assert process.wait() == 0
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("served.db*"))
    assert b"What is 2 + 2?" in stored and "generateContent" in process.output
    assert secret not in process.output and secret.encode() not in stored
    assert not [answer for answer in answers if secret in answer]
