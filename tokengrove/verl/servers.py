"""The servers that agent loops run on, each with the connections of three kinds of callers.

Connections are opened for one batch and closed after it, so batches may run on different event loops. Those of loops
have no admin key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokengrove.client import AsyncClient, AsyncSession, Client, Session
from tokengrove.client.asgi import ASGIApp
from tokengrove.errors import InvalidRequest, SessionClosed
from tokengrove.rollout.server_template import ServerTemplate
from tokengrove.rollout.server_tokenizer import ServerTokenizer

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: its address or its application in this process, and its admin key.

    `live`: the sessions of running loops, by which tokenizers reach it.
    """

    url: str | None
    app: ASGIApp | None
    admin_key: str | None
    live: dict[str, Session] = field(default_factory=dict)

    @classmethod
    def of(cls, handle: Any, admin_key: str | None) -> Address:
        """Read an address or a client. Raises InvalidRequest for others."""
        if isinstance(handle, str):
            return cls(handle, None, admin_key)
        if isinstance(handle, AsyncClient | Client):
            app = None if handle.hold is None else handle.hold.app
            return cls(handle.url if app is None else None, app, admin_key or handle.admin_key)
        message = f"a server is given as its address or a client of it, not as {type(handle).__name__!r}"
        raise InvalidRequest(message, param="server_handles")


def addresses(handles: Any, admin_key: str | None) -> list[Address]:
    """Read one or several addresses or clients, or a server manager. Raises InvalidRequest for none and for others."""
    handles = getattr(handles, "server_handles", handles)
    listed = handles if isinstance(handles, Sequence) and not isinstance(handles, str) else [handles]
    if handles is None or not listed:
        raise InvalidRequest("give at least one address or client of a server", param="server_handles")
    return [Address.of(handle, admin_key) for handle in listed]


class Server:
    """The open connections to a server. `control` is the trainer's; loops get sessions of the other two."""

    def __init__(self, control: AsyncClient, loops: AsyncClient, tokenizers: Client, live: dict[str, Session]) -> None:
        self.control, self._loops, self._tokenizers, self._live = control, loops, tokenizers, live
        self._template: ServerTemplate | None = None

    def of_agent(self, started: AsyncSession) -> AsyncSession:
        """A session as its agent has it: with the agent's key only."""
        return AsyncSession(self._loops, _of_agent(started))

    def tokenizer(self, started: AsyncSession) -> ServerTokenizer:
        """The tokenizer of the loop of a session."""
        self._live[started.session_id] = session = Session(self._tokenizers, _of_agent(started))
        live = LiveSession(session, self._live)
        self._template = self._template or ServerTemplate(live)
        return ServerTokenizer(live, template=self._template)

    def ended(self, started: AsyncSession) -> None:
        """Say that a session has ended."""
        self._live.pop(started.session_id, None)


class LiveSession:
    """A session that tokenizes. Once it has ended, another live one of the worker does it: a loop may keep a tokenizer
    for all loops of its class, also in later batches."""

    def __init__(self, session: Session, live: dict[str, Session]) -> None:
        self._session, self._live = session, live

    def tokenize(self, messages: Any, **options: Any) -> list[int]:
        """As `Session.tokenize`."""
        return self._ask(lambda session: session.tokenize(messages, **options))

    def end_token_ids(self) -> list[int]:
        """As `Session.end_token_ids`."""
        return self._ask(lambda session: session.end_token_ids())

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """As `Session.detokenize`."""
        return self._ask(lambda session: session.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    def _ask(self, call: Callable[[Session], _T]) -> _T:
        name = self._session.session_id
        while (session := self._live.get(name) or next(iter(list(self._live.values())), None)) is not None:
            try:
                return call(session)
            except SessionClosed:
                self._live.pop(session.session_id, None)
        raise SessionClosed("no session of a running loop is left to tokenize in")


def _of_agent(started: AsyncSession) -> dict[str, Any]:
    return {
        "session_id": started.session_id,
        "api_key": started.api_key,
        "control_key": started.api_key,
        "base_url": started.base_url,
        "root_url": started.root_url,
        "keys_expire_at": started.keys_expire_at,
    }


@asynccontextmanager
async def opened(places: Sequence[Address]) -> AsyncIterator[list[Server]]:
    """Open connections to servers for the block."""
    async with AsyncExitStack() as stack:
        blocking = stack.enter_context(ExitStack())
        servers = []
        for at in places:
            control = await stack.enter_async_context(AsyncClient(at.url, at.admin_key, app=at.app))
            loops = await stack.enter_async_context(AsyncClient(at.url, app=at.app))
            tokenizers = Client(at.url, app=at.app)
            blocking.callback(tokenizers.close)
            servers.append(Server(control, loops, tokenizers, at.live))
        yield servers
