"""The servers of agent loops, each with three separate connections: for the trainer, the loops and the tokenizers.

Connections are opened for one batch and closed after it, so batches may run on different event loops. The connections
of loops and tokenizers have no admin key.
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
    """The location of a server: its address or its application in this process, and its admin key.

    `live`: the sessions of running loops, through which tokenizers reach the server.
    """

    url: str | None
    app: ASGIApp | None
    admin_key: str | None
    live: dict[str, Session] = field(default_factory=dict)

    @classmethod
    def of(cls, handle: Any, admin_key: str | None) -> Address:
        """Read an address or a client. Raises InvalidRequest for other values."""
        if isinstance(handle, str):
            return cls(handle, None, admin_key)
        if isinstance(handle, AsyncClient | Client):
            app = None if handle.hold is None else handle.hold.app
            return cls(handle.url if app is None else None, app, admin_key or handle.admin_key)
        message = f"a server must be an address or a client of a server, not {type(handle).__name__!r}"
        raise InvalidRequest(message, param="server_handles")


def addresses(handles: Any, admin_key: str | None) -> list[Address]:
    """Read addresses, clients or a server manager. Raises InvalidRequest if there are none, and for other values."""
    handles = getattr(handles, "server_handles", handles)
    listed = handles if isinstance(handles, Sequence) and not isinstance(handles, str) else [handles]
    if handles is None or not listed:
        raise InvalidRequest("give at least one address or client of a server", param="server_handles")
    return [Address.of(handle, admin_key) for handle in listed]


class Server:
    """The open connections to a server. `control` is the trainer's; loops get sessions on the other two."""

    def __init__(self, control: AsyncClient, loops: AsyncClient, tokenizers: Client, live: dict[str, Session]) -> None:
        self.control, self._loops, self._tokenizers, self._live = control, loops, tokenizers, live
        self._template: ServerTemplate | None = None

    def of_agent(self, started: AsyncSession) -> AsyncSession:
        """The session with the agent's key only, for its agent."""
        return AsyncSession(self._loops, _of_agent(started))

    def tokenizer(self, started: AsyncSession) -> ServerTokenizer:
        """The tokenizer for the loop of a session."""
        self._live[started.session_id] = session = Session(self._tokenizers, _of_agent(started))
        live = LiveSession(session, self._live)
        self._template = self._template or ServerTemplate(live)
        return ServerTokenizer(live, template=self._template)

    def ended(self, started: AsyncSession) -> None:
        """Record that a session has ended."""
        self._live.pop(started.session_id, None)


class LiveSession:
    """A session that tokenizes. After its end, other live sessions of the worker are used: a loop may keep a tokenizer
    for all loops of its class, also in later batches."""

    def __init__(self, session: Session, live: dict[str, Session]) -> None:
        self._session, self._live = session, live

    def tokenize(self, messages: Any, **options: Any) -> list[int]:
        """Like `Session.tokenize`."""
        return self._ask(lambda session: session.tokenize(messages, **options))

    def end_token_ids(self) -> list[int]:
        """Like `Session.end_token_ids`."""
        return self._ask(lambda session: session.end_token_ids())

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Like `Session.detokenize`."""
        return self._ask(lambda session: session.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    def _ask(self, call: Callable[[Session], _T]) -> _T:
        name = self._session.session_id
        while (session := self._live.get(name) or next(iter(list(self._live.values())), None)) is not None:
            try:
                return call(session)
            except SessionClosed:
                self._live.pop(session.session_id, None)
        raise SessionClosed("there is no session of a running loop to tokenize with")


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
    """Open connections to servers, and close them after the block."""
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
