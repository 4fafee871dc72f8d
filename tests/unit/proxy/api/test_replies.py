"""The writer of a stream: what came together is written together, every reader gets all, and it ends cleanly.

Each test runs twice: with a client that only ASGI knows, and with one that has a `ClientLine`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any, cast

import pytest

from proxy.api import replies
from proxy.api.connections import LINE, ClientLine
from proxy.api.replies import StreamReply
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import Delta, TextDelta
from proxy.sessions.attempts import Attempt
from proxy.turns.turns import Turns
from proxy.types import Interaction
from tests.support import let_pass, until
from tests.unit.proxy.protocols.message_bodies import answered
from tokengrove.errors import EngineFailed


@dataclass(eq=False)
class FakeChoice:
    """A `Choice` whose deltas and end the test gives."""

    attempt: Attempt
    interaction: Interaction = field(default_factory=lambda: answered("x"))
    deltas: list[Delta] = field(default_factory=list)
    watchers: list[Callable[[], None]] = field(default_factory=list)
    ended: asyncio.Future[Interaction] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    prompt_tokens: int = 1

    def answer(self) -> Answer:
        return Answer(self.ended.result())

    def show(self, *texts: str) -> None:
        for text in texts:
            self.deltas.append(TextDelta(text))
            for wake in self.watchers:
                wake()

    def end(self) -> None:
        self.ended.set_result(self.interaction)


class FakeTurns:
    """Notes which replies were written to their end."""

    log_content = False

    def __init__(self) -> None:
        self.written: list[Attempt] = []
        self.earlier = self

    def leave(self, attempt: Attempt) -> None:
        attempt.leave()

    def replied(self, attempt: Attempt) -> None:
        self.written.append(attempt)

    async def yield_to_others(self) -> None:
        await asyncio.sleep(0)


class Client:
    """The other side of one reply: `sent` are the bodies, and `open` stays cleared while its connection is full.

    It is also the transport and the flow of its line, if it has one.
    """

    has_line = False

    def __init__(self, choices: Sequence[FakeChoice]) -> None:
        body = {"model": "m", "n": len(choices), "messages": [{"role": "user", "content": "hi"}], "stream": True}
        self.turns = FakeTurns()
        self.sent: list[bytes] = []
        self.left = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self.line = ClientLine(cast("asyncio.Transport", self), self)
        asked = ChatProtocol().parse(body)
        self.reply = StreamReply(cast("Turns", self.turns), asked, choices, ChatProtocol())
        scope: dict[str, Any] = {"method": "POST", "headers": []}
        if self.has_line:
            scope[LINE] = self.line
        self.task = asyncio.create_task(self.reply(scope, self.receive, self.send))

    @property
    def write_paused(self) -> bool:
        return not self.open.is_set()

    @write_paused.setter
    def write_paused(self, paused: bool) -> None:
        raise NotImplementedError

    def write(self, chunk: bytes) -> None:
        """Take one chunk of a chunked body."""
        size, _, rest = chunk.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2 and rest.endswith(b"\r\n")
        self.sent.append(rest[:-2])

    def leave(self) -> None:
        self.left.set()
        if self.has_line:
            self.line.leave()
            self.open.set()  # a lost connection takes everything

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.open.wait()
        if message["type"] == "http.response.body" and not self.left.is_set():
            self.sent.append(message["body"])

    def text(self, choice: int = 0) -> str:
        """The text of a choice that the events so far carry."""
        blocks = [line[6:] for line in b"".join(self.sent).decode().split("\n") if line.startswith("data: {")]
        events = [json.loads(block) for block in blocks]
        parts = [part for event in events for part in event.get("choices", ()) if part["index"] == choice]
        return "".join(part["delta"].get("content") or "" for part in parts)


@pytest.fixture(autouse=True, params=[False, True], ids=["receive", "line"])
def _has_line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "has_line", request.param)


def one_choice() -> FakeChoice:
    return FakeChoice(Attempt("key"))


async def test_what_came_while_the_connection_was_full_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "KEEPALIVE_S", 1e6)  # the timer of a silent stream would wake the writer, too
    choice = one_choice()
    client = Client([choice])
    choice.show("a")
    await until(lambda: client.text() == "a")
    client.open.clear()
    choice.show("b")
    await let_run()
    choice.show("c", "d", "e")
    await let_run()
    client.open.set()
    await until(lambda: client.text() == "abcde")
    assert [body.count(b"data: ") for body in client.sent] == [2, 1, 3]
    choice.end()
    await client.task
    assert client.sent[-1].endswith(b"data: [DONE]\n\n") and client.turns.written == [choice.attempt]


async def test_a_long_backlog_is_written_in_parts_and_others_run_between_them() -> None:
    choice = one_choice()
    texts = [f"{number} " for number in range(5000)]
    choice.show(*texts)
    choice.end()
    client = Client([choice])
    sent: list[int] = []
    while not client.task.done():
        sent.append(len(client.sent))
        await asyncio.sleep(0)
    sent.append(len(client.sent))
    assert client.text() == "".join(texts) and client.turns.written == [choice.attempt]
    assert max(body.count(b"data: ") for body in client.sent) < 1000
    assert max(map(sub, sent[1:], sent)) == 2  # the last part and the end


async def test_a_slow_client_is_given_no_more_than_one_part_of_a_backlog() -> None:
    choice = one_choice()
    client = Client([choice])
    client.open.clear()
    choice.show(*(["x"] * 5000))
    await let_run()
    client.open.set()
    await until(lambda: len(client.sent) > 0)
    client.open.clear()
    assert client.sent[0].count(b"data: ") < 1000
    client.leave()
    await client.task


async def test_every_reader_gets_everything_from_the_beginning() -> None:
    choice = one_choice()
    first = Client([choice])
    choice.show("a", "b")
    await until(lambda: first.text() == "ab")
    second = Client([choice])
    choice.show("c")
    await until(lambda: first.text() == second.text() == "abc")
    second.leave()
    await second.task
    choice.show("d")
    choice.end()
    await first.task
    assert (first.text(), second.text()) == ("abcd", "abc") and second.turns.written == []
    assert choice.watchers == [] and choice.attempt.readers == 0


async def test_a_client_that_leaves_is_noticed_while_nothing_comes_and_while_it_does_not_read() -> None:
    for full in (False, True):
        choice = one_choice()
        client = Client([choice])
        choice.show("a")
        await until(lambda client=client: client.text() == "a")  # type: ignore[misc]
        if full:
            client.open.clear()
            choice.show("b")
            await let_run()
        client.leave()
        await client.task
        assert choice.watchers == [] and choice.attempt.readers == 0 and client.turns.written == []


async def test_the_failure_of_one_choice_ends_the_stream_after_what_was_shown() -> None:
    attempt = Attempt("key")
    slow, failing = FakeChoice(attempt), FakeChoice(attempt)
    client = Client([slow, failing])
    slow.show("a")
    failing.show("b")
    failing.ended.set_exception(EngineFailed("it broke"))
    await client.task
    assert (client.text(0), client.text(1)) == ("a", "b")
    assert b'"engine_failed"' in client.sent[-1] and client.turns.written == []


async def test_a_failure_before_anything_is_written_is_raised() -> None:
    choice = one_choice()
    client = Client([choice])
    choice.ended.set_exception(EngineFailed("it broke"))
    with pytest.raises(EngineFailed):
        await client.task
    assert not client.reply.started and client.sent == []


async def test_a_failure_that_nobody_reads_is_not_reported_as_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    choice = one_choice()
    client = Client([choice])
    choice.show("a")
    client.leave()
    await client.task
    choice.ended.set_exception(EngineFailed("it broke"))
    choice.ended.exception()
    await let_run()
    assert caplog.messages == []


async def test_a_stream_that_cannot_be_encoded_fails_as_a_whole() -> None:
    choice = one_choice()
    client = Client([choice])
    choice.show("a")
    await until(lambda: client.text() == "a")
    choice.deltas.append(TextDelta("\ud800"))
    choice.watchers[0]()
    with pytest.raises(TypeError, match="surrogates"):
        await client.task
    assert choice.watchers == [] and client.turns.written == []


async def test_a_client_that_left_before_its_reply_gets_none_and_no_reader_stays() -> None:
    choice = one_choice()
    client = Client([choice])
    client.leave()
    choice.show("a")
    await client.task
    assert client.sent == [] and choice.watchers == [] and choice.attempt.readers == 0


async def test_a_line_costs_no_task_and_none_has_a_watcher_after_the_end() -> None:
    choice = one_choice()
    before = len(asyncio.all_tasks())
    client = Client([choice])
    choice.show("a")
    await until(lambda: client.text() == "a")
    assert len(asyncio.all_tasks()) - before == (1 if client.has_line else 3)
    choice.end()
    await client.task
    assert client.line.watchers == []


async def test_keepalives_come_only_after_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = one_choice()
    client = Client([choice])
    await let_pass(replies.KEEPALIVE_S - 1, monkeypatch)
    choice.show("a")
    await let_run()
    await let_pass(replies.KEEPALIVE_S - 1, monkeypatch)
    assert client.text() == "a" and b"keepalive" not in b"".join(client.sent)
    await let_pass(2, monkeypatch)
    assert client.sent[-1] == b": keepalive\n"
    await let_pass(replies.KEEPALIVE_S + 1, monkeypatch)
    assert b"".join(client.sent).count(b": keepalive\n") == 2
    choice.end()
    await client.task


async def let_run() -> None:
    """Let everything that is ready run."""
    for _ in range(10):
        await asyncio.sleep(0)
