"""Asking a fake external model: the requests of three APIs, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from proxy.models.declared import Upstream
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.protocols.google.protocol import GoogleProtocol
from proxy.protocols.messages.protocol import MessagesProtocol
from proxy.protocols.responses.protocol import ResponsesProtocol
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.types import Api, ImageFile, TurnRequest
from proxy.upstream.answer import UpstreamAnswer
from proxy.upstream.client import UpstreamClient
from tests.upstreams import KEY, FakeUpstream, Sent, Spoken, fake_upstream
from tokengrove.options.model import UpstreamApi

PROTOCOLS = {
    **{Api.CHAT: ChatProtocol(), Api.RESPONSES: ResponsesProtocol(), Api.MESSAGES: MessagesProtocol()},
    Api.GOOGLE: GoogleProtocol(),
}


def parsed(api: Api, body: dict[str, Any]) -> TurnRequest:
    """A request of an API."""
    return PROTOCOLS[api].parse({"model": "judge", **body})


def chat(**body: Any) -> TurnRequest:
    """A chat request that says "hi"."""
    return parsed(Api.CHAT, {"messages": [{"role": "user", "content": "hi"}], **body})


async def no_images(digests: Sequence[str]) -> list[ImageFile]:
    """An image store that is empty."""
    return []


class Asking:
    """A client of a fake external model. `deltas`: those of the last answer; `on_delta`: called as they come."""

    def __init__(self, fake: FakeUpstream, upstream: Upstream) -> None:
        self.fake, self.upstream = fake, upstream
        self.client = UpstreamClient(upstream)
        self.emitted: list[list[Delta]] = []
        self.on_delta: Callable[[], None] = lambda: None

    def emit(self, deltas: list[Delta]) -> None:
        self.emitted.append(deltas)
        self.on_delta()

    @property
    def deltas(self) -> list[Delta]:
        return [delta for deltas in self.emitted for delta in deltas]

    async def ask(
        self, request: TurnRequest, *answers: Sent | Spoken, files: Sequence[ImageFile] = ()
    ) -> UpstreamAnswer:
        """Ask, and let the fake model send these answers."""
        self.fake.answers.extend(answers)
        self.emitted = []
        request = replace(request, files={**request.files, **{file.digest: file for file in files}})
        return await self.client.answer(
            self.client.body(request, request.sampling), request.files, self.emit, no_images
        )

    async def body(self, request: TurnRequest, **more: Any) -> Any:
        """The JSON that the fake model receives."""
        await self.ask(request, **more)
        return self.fake.asked[-1].body


@asynccontextmanager
async def asking(api: UpstreamApi, **changes: Any) -> AsyncIterator[Asking]:
    """A client of a fake external model that speaks an API."""
    async with fake_upstream() as fake:
        found = Asking(fake, Upstream(fake.url, api, "gpt-judge", KEY, 60.0)._replace(**changes))
        try:
            yield found
        finally:
            await found.client.close()


def joined(deltas: Sequence[Delta]) -> list[tuple[str, ...]]:
    """Deltas with neighbours joined: texts, reasoning, and calls with their arguments and end."""
    out: list[tuple[str, ...]] = []
    for delta in deltas:
        match delta:
            case TextDelta(text):
                new: tuple[str, ...] = ("text", text)
            case ReasoningDelta(text):
                new = ("reasoning", text)
            case ToolCallStart(index, call_id, name):
                new = ("call", str(index), call_id, name)
            case ToolCallArguments(index, fragment):
                new = (f"arguments {index}", fragment)
            case ToolCallEnd(index):
                new = ("end", str(index))
            case _:
                raise AssertionError(delta)
        if out and out[-1][0] == new[0] and len(new) == 2 and new[0] != "end":
            out[-1] = (new[0], out[-1][1] + new[1])
        else:
            out.append(new)
    return out
