"""What a gateway's file says: how it is started, where an agent sends its requests, and how it exports samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from benchmarks.client import Address
from benchmarks.scoring import Sample


@dataclass(frozen=True, slots=True)
class Place:
    """`python`: the interpreter of the gateway's environment. `folder`: for its files, kept over a restart.

    `engine`: the URL of the engine, without `/v1`. `model`: the model folder, with a tokenizer and a chat template.
    """

    python: Path
    port: int
    folder: Path
    engine: str
    model: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Start:
    """A command and its environment variables."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Gateway(ABC):
    """A gateway. `package`: the distribution whose version is reported; None: it is part of the benchmark.

    `wire`: what it sends to the engine. `no_tokens`: why it exports no token ids; "" if it does. `keeps`: where it
    keeps what it recorded. `health`: a path that it answers once it is ready. `streams`: tokens reach an agent that
    streams as the engine samples them.
    """

    name: ClassVar[str]
    package: ClassVar[str | None]
    licence: ClassVar[str]
    wire: ClassVar[str]
    keeps: ClassVar[str]
    no_tokens: ClassVar[str] = ""
    health: ClassVar[str] = "/health"
    streams: ClassVar[bool] = True

    @abstractmethod
    def start(self, place: Place) -> Start:
        """Return the command that serves on `place.port` of the loopback address."""

    async def prepare(self, http: aiohttp.ClientSession, place: Place) -> None:  # noqa: B027 - most need nothing
        """Tell a server that has just started what its command could not, such as the engine."""

    @abstractmethod
    async def open(self, http: aiohttp.ClientSession, place: Place, session: int) -> Address:
        """Begin a session, if the gateway has a call for it, and return the address of its agent."""

    async def export(self, http: aiohttp.ClientSession, place: Place, session: int) -> list[Sample]:
        """Return the training samples of a session. Only called if `no_tokens` is empty."""
        raise NotImplementedError(self.no_tokens)


async def answer_of(response: aiohttp.ClientResponse) -> Any:
    """Return the JSON of an answer. Raises aiohttp.ClientError with the text for any other status than 200 and 201."""
    if response.status not in (200, 201):
        text = (await response.text())[:300]
        raise aiohttp.ClientError(f"{response.method} {response.url}: {response.status} {text}")
    return await response.json(content_type=None)


def prompt_and_answer(session: int, prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    """Return the sample of one call, which trains its answer."""
    return Sample(session, [*prompt, *answer], [0] * len(prompt) + [1] * len(answer))
