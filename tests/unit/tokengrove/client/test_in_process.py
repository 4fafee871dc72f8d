"""The server in process: the whole API without sockets, for SDKs of both kinds, with what it gives over a socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import numpy as np
import openai
import pytest

from proxy.api.turn_routes import App
from proxy.app import build_app
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from proxy.serving.server import serving
from proxy.settings import Settings
from proxy.turns import turns
from tests.support import default_url, says, tiny_renderer, until, user
from tests.support import serving as serving_in_process
from tokengrove.client import AsyncClient, AsyncSession, Client, Export, Session
from tokengrove.errors import ConfigurationError, EndedOtherwise, Forbidden, SessionNotFound

HELLO: list[Any] = [user("hello")]
ANSWER = "one two three"


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the turns of agents that have left end at once."""
    monkeypatch.setattr(turns, "GRACE_S", 0.0)


def new_app(folder: Path, script: Script | None = None, **settings: Any) -> App:
    """A server on the scripted engine that nobody has started."""
    renderer = tiny_renderer()
    engine = ScriptedEngine(script or says(*[ANSWER] * 20), vocab_size=renderer.vocab_size)
    configured = Settings(**{"database_url": default_url(folder), "migrate": True, **settings})
    return build_app(configured, engine=engine, renderer=renderer)


async def chat(session: AsyncSession, http: Any) -> str:
    """One turn over chat completions, streamed, and one that is not."""
    sdk = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
    stream = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
    streamed = "".join([part.choices[0].delta.content or "" async for part in stream])
    reply = await sdk.chat.completions.create(model="m", messages=HELLO)
    assert reply.choices[0].message.content == streamed
    return streamed


async def responses(session: AsyncSession, http: Any) -> str:
    sdk = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
    stream = await sdk.responses.create(model="m", input="hello", stream=True)
    streamed = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    assert (await sdk.responses.create(model="m", input="hello")).output_text == streamed
    return streamed


async def messages(session: AsyncSession, http: Any) -> str:
    sdk = anthropic.AsyncAnthropic(base_url=session.root_url, api_key=session.api_key, http_client=http)
    async with sdk.messages.stream(model="m", max_tokens=50, messages=HELLO) as stream:
        streamed = "".join([text async for text in stream.text_stream])
    reply = await sdk.messages.create(model="m", max_tokens=50, messages=HELLO)
    assert reply.content[0].type == "text"
    assert reply.content[0].text == streamed
    return streamed


def blocking_chat(session: Session, http: Any) -> str:
    sdk = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
    stream = sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
    streamed = "".join([part.choices[0].delta.content or "" for part in stream])
    assert sdk.chat.completions.create(model="m", messages=HELLO).choices[0].message.content == streamed
    return streamed


def blocking_responses(session: Session, http: Any) -> str:
    sdk = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
    stream = sdk.responses.create(model="m", input="hello", stream=True)
    streamed = "".join([event.delta for event in stream if event.type == "response.output_text.delta"])
    assert sdk.responses.create(model="m", input="hello").output_text == streamed
    return streamed


def blocking_messages(session: Session, http: Any) -> str:
    sdk = anthropic.Anthropic(base_url=session.root_url, api_key=session.api_key, http_client=http)
    with sdk.messages.stream(model="m", max_tokens=50, messages=HELLO) as stream:
        streamed = "".join(stream.text_stream)
    reply = sdk.messages.create(model="m", max_tokens=50, messages=HELLO)
    assert reply.content[0].type == "text"
    assert reply.content[0].text == streamed
    return streamed


AGENTS = [(chat, "httpx"), (chat, "httpx2"), (responses, "httpx"), (messages, "httpx2")]
BLOCKING_AGENTS = [
    (blocking_chat, "httpx"),
    (blocking_chat, "httpx2"),
    (blocking_responses, "httpx"),
    (blocking_messages, "httpx2"),
]


async def test_asyncio_sdks_run_in_process(tmp_path: Path) -> None:
    async with AsyncClient(app=new_app(tmp_path, admin_key="k"), admin_key="k") as client:
        for agent, library in AGENTS:
            async with client.session("task") as session, client.http_client(library) as http:
                assert await agent(session, http) == ANSWER
                await session.set_reward(1.0)
            samples = (await client.export(session_id=session.session_id)).samples
            assert [tiny_renderer().decode(sample.input_ids[sample.loss_mask == 1]) for sample in samples]
            assert [sample.score for sample in samples] == [1.0] * len(samples)


def test_blocking_sdks_run_in_process(tmp_path: Path) -> None:
    with Client(app=new_app(tmp_path, admin_key="k"), admin_key="k") as client:
        for agent, library in BLOCKING_AGENTS:
            with client.session("task") as session, client.http_client(library) as http:
                assert agent(session, http) == ANSWER
                session.set_reward(1.0)
            samples = client.export(session_id=session.session_id).samples
            assert [sample.score for sample in samples] == [1.0] * len(samples)


async def test_blocking_agents_in_threads_of_the_event_loop_that_runs_the_server(tmp_path: Path) -> None:
    app = new_app(tmp_path)
    together = threading.Barrier(4)

    def agent() -> str:
        with Client(app=app) as client, client.session("task") as session, client.http_client() as http:
            together.wait(60)
            answer = blocking_chat(session, http)
            session.set_reward(1.0)
        return answer

    async with AsyncClient(app=app) as client:
        assert await asyncio.gather(*(asyncio.to_thread(agent) for _ in range(4))) == [ANSWER] * 4
        assert len((await client.export(filter={"task_id": "task"})).sessions) == 4


def test_blocking_agents_in_threads_share_one_client(tmp_path: Path) -> None:
    answers: list[str] = []
    with Client(app=new_app(tmp_path)) as client, client.http_client() as http:

        def agent(name: str) -> None:
            with client.session(name) as session:
                answers.append(blocking_chat(session, http))

        threads = [threading.Thread(target=agent, args=(f"task-{n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [ANSWER] * 4


async def test_an_agent_reads_the_first_token_while_the_model_still_samples(tmp_path: Path) -> None:
    script = play([Reply(tiny_renderer().encode(ANSWER), fault=Fault.HANG, fault_after=3)])
    app = new_app(tmp_path, script)
    async with AsyncClient(app=app) as client, client.session("task") as session, client.http_client() as http:
        sdk = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
        stream = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
        text = ""
        while not text:
            text += (await anext(stream)).choices[0].delta.content or ""
        assert ANSWER.startswith(text)
        assert app.state.engine.running


def test_a_blocking_agent_reads_the_first_token_while_the_model_still_samples(tmp_path: Path) -> None:
    script = play([Reply(tiny_renderer().encode(ANSWER), fault=Fault.HANG, fault_after=3)])
    app = new_app(tmp_path, script)
    with Client(app=app) as client, client.session("task") as session, client.http_client("httpx2") as http:
        sdk = anthropic.Anthropic(base_url=session.root_url, api_key=session.api_key, http_client=http)
        with sdk.messages.stream(model="m", max_tokens=50, messages=HELLO) as stream:
            assert ANSWER.startswith(next(iter(stream.text_stream)))
            assert app.state.engine.running


async def leave_early(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
    async with stream:
        await anext(stream)


async def cancel(sdk: openai.AsyncOpenAI) -> None:
    streams = sdk.chat.completions.create(model="m", messages=HELLO, stream=True)

    async def agent() -> None:
        async for _ in await streams:
            read.set()

    read = asyncio.Event()
    task = asyncio.create_task(agent())
    await read.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [leave_early, cancel])
async def test_the_turn_of_an_agent_that_leaves_is_aborted(
    tmp_path: Path, leave: Callable[[openai.AsyncOpenAI], Awaitable[None]]
) -> None:
    script = play([Reply(tiny_renderer().encode(ANSWER), fault=Fault.HANG, fault_after=1)])
    app = new_app(tmp_path, script)
    async with AsyncClient(app=app) as client, client.session("task") as session, client.http_client() as http:
        await leave(openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http))
        await until(lambda: not app.state.engine.running)


def conversation(session: Session, http: Any) -> None:
    """Three turns of one conversation: sampled logprobs, a tool and an answer that the others follow."""
    sdk = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
    history = list(HELLO)
    for _ in range(3):
        reply = sdk.chat.completions.create(model="m", messages=history, max_tokens=7, logprobs=True)
        history += [reply.choices[0].message.model_dump(exclude_none=True), user("go on")]
    session.set_reward(0.5)


def exported(client: Client) -> Export:
    with client.session("task", session_id="s") as session, client.http_client() as http:
        conversation(session, http)
    return client.export(session_id="s", layout="individual")


def test_samples_are_the_same_as_over_a_socket_token_for_token(tmp_path: Path) -> None:
    (tmp_path / "socket").mkdir()
    over_socket, in_process = (
        Settings(engine="scripted", port=0, database_url=default_url(folder), log_level="warning")
        for folder in (tmp_path, tmp_path / "socket")
    )
    with serving(over_socket) as url, Client(url) as client:
        expected = exported(client)
    with Client(app=build_app(in_process)) as client:
        found = exported(client)
    assert len(found.samples) == len(expected.samples) == 3
    for mine, its in zip(found.samples, expected.samples, strict=True):
        for name in ("input_ids", "loss_mask", "logprobs", "versions", "rewards"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(its, name))


@pytest.mark.parametrize(
    "settings",
    [
        {"public_url": "https://gateway.example/prefix"},
        {"admin_key": "k", "public_url": "https://gateway.example", "allowed_hosts": "gateway.example"},
        {"forwarded_allow_ips": "*"},
    ],
    ids=lambda settings: "-".join(settings),
)
async def test_the_addresses_of_sessions_reach_the_server_whatever_its_settings(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    async with (
        AsyncClient(app=new_app(tmp_path, **settings), admin_key="k") as client,
        client.session("task", session_id="a/b") as session,
        client.http_client() as http,
    ):
        assert session.base_url.startswith(f"{client.url}/")
        assert await chat(session, http) == ANSWER
        if "admin_key" in settings:  # else the path has no secret
            await session.rotate_keys(["path"])
            assert session.base_url.startswith(f"{client.url}/")
            assert await chat(session, http) == ANSWER


async def test_errors_of_the_server_are_raised_as_over_a_network(tmp_path: Path) -> None:
    app = new_app(tmp_path, admin_key="k")
    async with AsyncClient(app=app, admin_key="k") as client, client.http_client() as http:
        with pytest.raises(SessionNotFound):
            await client.export(session_id="unknown")
        with pytest.raises(Forbidden):
            await AsyncClient(app=app, admin_key="wrong").sessions()
        session = await client.start_session("task")
        await session.end(outcome="Finished")
        with pytest.raises(EndedOtherwise):
            await session.end(outcome="Failed")
        sdk = openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="x", http_client=http)
        with pytest.raises(openai.AuthenticationError):
            await sdk.chat.completions.create(model="m", messages=HELLO)


async def test_a_client_uses_a_server_that_runs_already(tmp_path: Path) -> None:
    async with serving_in_process(tmp_path, says("one", "two")) as server:
        async with AsyncClient(app=server.app) as client, client.session("task") as session:
            assert await client.health() == {"status": "ok"}
            async with client.http_client() as http:
                sdk = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http)
                reply = await sdk.chat.completions.create(model="m", messages=HELLO)
        assert reply.choices[0].message.content == "one"
        assert (await server.answer(HELLO, session="other"))["content"] == "two"


def test_a_server_that_was_stopped_is_not_started_again(tmp_path: Path) -> None:
    app = new_app(tmp_path)
    with Client(app=app) as client:
        client.health()
    with pytest.raises(ConfigurationError, match="build another"):
        Client(app=app).health()


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_agents_over_a_network_have_a_connection_each(tmp_path: Path, library: Any) -> None:
    async with AsyncClient("http://127.0.0.1:8080") as client, client.http_client(library.__name__) as http:
        assert isinstance(http, library.AsyncClient)
        assert http.timeout == library.Timeout(3600.0, connect=60.0, pool=None)
    with Client("http://127.0.0.1:8080") as blocking, blocking.http_client(library.__name__, timeout_s=5.0) as http:
        assert isinstance(http, library.Client)
        assert http.timeout.read == 5.0
