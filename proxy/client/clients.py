"""The two clients: they send what the operations say and do nothing else, one blocking, one for asyncio."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar, Unpack

import httpx

from proxy.client import operations
from proxy.client.operations import StartedSession, Steps
from proxy.client.options import ClaimRequest, EndOptions, ExportRequest, RewardOptions, SessionOptions
from proxy.client.values import Acknowledged, Claim, Export, Json, Number, SessionTree
from proxy.client.wire import TIMEOUT_S, Connection, decode
from proxy.errors import ProxyError

T = TypeVar("T")


class Session(StartedSession):
    """A live session. Made by `Client.session` or `Client.start_session`."""

    def __init__(self, client: Client, answer: Mapping[str, Json]) -> None:
        super().__init__(answer)
        self._client = client

    def set_reward(self, reward: Number | None = None, **options: Unpack[RewardOptions]) -> None:
        """Reward the last complete interaction, or whatever the options say (`interaction_id`, `rewards`, ...)."""
        self._client.run(operations.set_reward(self, reward, options))

    def mark(self, interaction_id: str, *, trainable: bool, spans: Sequence[tuple[int, int]] | None = None) -> None:
        """Say whether an interaction is trained; with `spans`, only these ranges [start, end) of its output tokens."""
        self._client.run(operations.mark(self, interaction_id, trainable, spans))

    def end(self, **options: Unpack[EndOptions]) -> int:
        """Seal the session; returns how many interactions it has. Doing it twice is no error."""
        return self._client.run(operations.end(self, options))


class Client(Connection):
    """Blocking client. Every method raises the server's error as its `proxy.errors` class, or ServerUnreachable."""

    def __init__(self, url: str, admin_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(url, admin_key, timeout_s)
        self._http = httpx.Client()
        weakref.finalize(self, self._http.close)  # `with Client(url).session(..)` leaves nobody to close it

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    @contextmanager
    def session(self, task_id: str, **options: Unpack[SessionOptions]) -> Iterator[Session]:
        """Start a session and end it with the block: as Failed, with the reason, when an exception leaves it."""
        session = self.start_session(task_id, **options)
        try:
            yield session
        except BaseException as error:
            with suppress(ProxyError):  # what happened in the block matters more
                self.run(operations.leave(session, error))
            raise
        self.run(operations.leave(session, None))

    def start_session(self, task_id: str, **options: Unpack[SessionOptions]) -> Session:
        """Start a session that the caller ends."""
        return Session(self, self.run(operations.start(task_id, options)))

    def export(
        self,
        *,
        session_id: str | None = None,
        session_ids: Sequence[str] | None = None,
        **request: Unpack[ExportRequest],
    ) -> Export:
        """All samples of the sessions that are named or that the filter finds; layout `concat` unless said.

        `format` is how they travel: they are the same in any. Formats arrow and parquet need pyarrow on both sides.
        """
        return self.run(operations.export(session_id, session_ids, request))

    def claim(self, **request: Unpack[ClaimRequest]) -> Claim:
        """Lease ended sessions that no other consumer holds; with `export` their samples come along."""
        return self.run(operations.claim(request))

    def acknowledge(self, claim: Claim | str | None = None, session_ids: Sequence[str] | None = None) -> Acknowledged:
        """Say that a claim, or some sessions of it, are done with: they are never given again. Twice is harmless."""
        return self.run(operations.acknowledge(claim, session_ids))

    def sessions(self) -> list[dict[str, Json]]:
        """All sessions, oldest first, as the server lists them."""
        return self.run(operations.sessions())

    def session_tree(self, session_id: str) -> SessionTree:
        """One session with all its interactions. Raises SessionNotFound."""
        return self.run(operations.session_tree(session_id))

    def health(self) -> dict[str, Json]:
        """What the server says of itself."""
        return self.run(operations.health())

    def grant_capacity(self, n: int = 1) -> int:
        """Let `n` more sessions start; returns how many may now."""
        return self.run(operations.grant_capacity(n))

    def update_weights(self, path: str, *, version: int | None = None, mode: str = "abort") -> int:
        """Load the weights in folder `path` of the server's machine; returns their version (default: one more).

        `mode` (abort, drain, retract, in_place) says what becomes of requests in flight: none of them is lost.
        """
        return self.run(operations.update_weights(path, version, mode))

    def run(self, steps: Steps[T]) -> T:
        try:
            call = next(steps)
            while True:
                call = steps.send(self._send(call))
        except StopIteration as end:
            result: T = end.value
            return result

    def _send(self, call: operations.Call) -> Json:
        try:
            response = self._http.request(**self.arguments(call))
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
        return decode(response, call.raw)


class AsyncSession(StartedSession):
    """A live session. Made by `AsyncClient.session` or `AsyncClient.start_session`."""

    def __init__(self, client: AsyncClient, answer: Mapping[str, Json]) -> None:
        super().__init__(answer)
        self._client = client

    async def set_reward(self, reward: Number | None = None, **options: Unpack[RewardOptions]) -> None:
        await self._client.run(operations.set_reward(self, reward, options))

    async def mark(
        self, interaction_id: str, *, trainable: bool, spans: Sequence[tuple[int, int]] | None = None
    ) -> None:
        await self._client.run(operations.mark(self, interaction_id, trainable, spans))

    async def end(self, **options: Unpack[EndOptions]) -> int:
        return await self._client.run(operations.end(self, options))


class AsyncClient(Connection):
    """Client for asyncio. Every method raises the server's error as its `proxy.errors` class, or ServerUnreachable."""

    def __init__(self, url: str, admin_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(url, admin_key, timeout_s)
        self._http = httpx.AsyncClient()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    @asynccontextmanager
    async def session(self, task_id: str, **options: Unpack[SessionOptions]) -> AsyncIterator[AsyncSession]:
        session = await self.start_session(task_id, **options)
        try:
            yield session
        except BaseException as error:
            with suppress(ProxyError):  # what happened in the block matters more
                await self.run(operations.leave(session, error))
            raise
        await self.run(operations.leave(session, None))

    async def start_session(self, task_id: str, **options: Unpack[SessionOptions]) -> AsyncSession:
        return AsyncSession(self, await self.run(operations.start(task_id, options)))

    async def export(
        self,
        *,
        session_id: str | None = None,
        session_ids: Sequence[str] | None = None,
        **request: Unpack[ExportRequest],
    ) -> Export:
        return await self.run(operations.export(session_id, session_ids, request))

    async def claim(self, **request: Unpack[ClaimRequest]) -> Claim:
        return await self.run(operations.claim(request))

    async def acknowledge(
        self, claim: Claim | str | None = None, session_ids: Sequence[str] | None = None
    ) -> Acknowledged:
        return await self.run(operations.acknowledge(claim, session_ids))

    async def sessions(self) -> list[dict[str, Json]]:
        return await self.run(operations.sessions())

    async def session_tree(self, session_id: str) -> SessionTree:
        return await self.run(operations.session_tree(session_id))

    async def health(self) -> dict[str, Json]:
        return await self.run(operations.health())

    async def grant_capacity(self, n: int = 1) -> int:
        return await self.run(operations.grant_capacity(n))

    async def update_weights(self, path: str, *, version: int | None = None, mode: str = "abort") -> int:
        return await self.run(operations.update_weights(path, version, mode))

    async def run(self, steps: Steps[T]) -> T:
        try:
            call = next(steps)
            while True:
                call = steps.send(await self._send(call))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _send(self, call: operations.Call) -> Json:
        try:
            response = await self._http.request(**self.arguments(call))
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
        return decode(response, call.raw)
