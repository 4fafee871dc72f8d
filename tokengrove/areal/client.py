"""One session with the methods of AReaL's `OpenAIProxyClient`.

The session starts and ends with the `async with` block. It is ended however the block is left, and an exception of the
block takes precedence over an error of the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Unpack

from tokengrove.areal import results
from tokengrove.areal.results import Interactions
from tokengrove.client import AsyncClient, AsyncSession, operations
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.client.operations import Steps
from tokengrove.client.options import ExportOptions, SessionOptions
from tokengrove.errors import InvalidRequest, RequestTimeout
from tokengrove.rollout.episode import START_S, Episode

STYLES = {"individual": results.individual, "concat": results.concat}


class OpenAIProxyClient:
    """One session of a server, with AReaL's names; use it in an `async with` block.

    AReaL's arguments are `base_url` (the server's address), `task_id` and `admin_api_key`. `session`, AReaL's
    `aiohttp.ClientSession`, is accepted and ignored: the client opens its own connections, and closes them at the end
    of the block. Instead of an address and a key, `client` may be an `AsyncClient`, which stays open;
    `AsyncClient(app=...)` runs in process. All other arguments are fields of `start_session`: `group_id`, `metadata`,
    `discount`, `credit`, `limits` and so on.

    The start waits up to `start_timeout_s` seconds while the server is full (429) or restarts; AReaL waits without a
    limit. Raises InvalidRequest for arguments that contradict each other.
    """

    def __init__(
        self,
        session: object = None,
        base_url: str | None = None,
        task_id: str | None = None,
        admin_api_key: str | None = None,
        *,
        client: AsyncClient | None = None,
        start_timeout_s: float = START_S,
        **options: Unpack[SessionOptions],
    ) -> None:
        if task_id is None:
            raise InvalidRequest("'task_id' is missing: the name of the task of the session", param="task_id")
        if client is None and base_url is None:
            raise InvalidRequest("give 'base_url', the address of a server, or 'client'", param="base_url")
        if client is not None and (base_url is not None or admin_api_key is not None):
            raise InvalidRequest("'client' has an address and a key: leave out 'base_url' and 'admin_api_key'")
        self.base_url = base_url if client is None else client.url
        self.task_id = task_id
        self.session_id: str | None = None
        self._admin_api_key, self._given, self._client = admin_api_key, client, client
        self._options, self._start_timeout_s = options, start_timeout_s
        self._episode: Episode | None = None
        self._discount: float | None = None
        self._is_open = False

    @property
    def session(self) -> AsyncSession:
        """The session, for operations that AReaL has no method for. Raises ValueError before the start."""
        return self.episode.session

    @property
    def episode(self) -> Episode:
        """The session from its start to its end. Raises ValueError before the start."""
        if self._episode is None:
            raise ValueError("the session has not started: use `async with` first")
        return self._episode

    @property
    def session_url(self) -> str:
        """The session's address for its agent, without /v1 like AReaL's: for both OpenAI's and Anthropic's SDKs.

        `session.base_url` ends in /v1, for clients that need it. Raises ValueError before the start.
        """
        return self.session.root_url

    @property
    def session_api_key(self) -> str:
        """The agent's key, which is valid for this session only. Raises ValueError before the start."""
        return self.session.api_key

    async def __aenter__(self) -> OpenAIProxyClient:
        if self._episode is not None:
            raise ValueError(f"this client has already started session {self.session_id!r}: create another client")
        self._client = self._given or AsyncClient(str(self.base_url), self._admin_api_key)
        try:
            self._episode = await Episode.start(
                self._client, self.task_id, self._options, delivery="runner", within_s=self._start_timeout_s
            )
        except BaseException:
            await self._close()
            raise
        self.session_id, self._is_open = self._episode.session_id, True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            await self.episode.__aexit__(kind, error, trace)
        finally:
            await self._close()

    async def set_reward(self, completion_id: str, reward: float) -> None:
        """Set the reward of one turn, also after the block; a second call replaces the reward.

        Raises NotFound for an unknown id (AReaL only logs it), and InvalidRequest for a reward that is not finite.
        """
        session = self.session
        await self._run(operations.set_reward(session, reward, {"interaction_id": completion_id}))

    async def set_last_reward(self, reward: float) -> None:
        """Set the reward of the last complete turn of the main agent, also after the block.

        Calls that failed or are still running are not turns; AReaL would give the reward to such a call and lose it.
        Raises InvalidRequest if there is no turn.
        """
        session = self.session
        await self._run(operations.set_reward(session, reward, {}))

    def apply_reward_discount(self, turn_discount: float = 1.0) -> Discounted:
        """Use this discount in all later exports. Awaiting the result returns all interactions, as in AReaL.

        Rewards that are set later are discounted in the same way. Raises RuntimeError on a second call, as AReaL does,
        and InvalidRequest for a discount outside 0 to 1.
        """
        if self._discount is not None:
            raise RuntimeError("apply_reward_discount should only be called once.")
        if not 0.0 <= turn_discount <= 1.0:
            raise InvalidRequest(f"'turn_discount' must be between 0 and 1, not {turn_discount}", param="turn_discount")
        self._discount = turn_discount
        return Discounted(self)

    async def export_interactions(
        self,
        discount: float | None = None,
        style: str = "individual",
        *,
        credit: str | None = None,
        timeout_s: float = 60.0,
        on_missing: OnMissing = "refuse",
    ) -> Interactions:
        """The complete turns by id, in order of completion; calls that failed or are still running are left out.

        Style individual: every turn, with its return as reward. `discount` (0 to 1) defaults to that of
        `apply_reward_discount`, then to the session's, then to 1. `credit` is `tree` (the default: a turn's return is
        its reward plus the discounted mean of the returns of its children) or `linear` (AReaL's rule: along the order
        of completion, across all branches).

        Style concat: one entry for each path of the conversation, whose tensors train all turns of the path. Its reward
        is the undiscounted sum of the rewards on its path; AReaL returns the last turn's reward and loses the others.

        In a session that records experts, each turn has them in `model_response.routed_experts`. A turn that lacks a
        row raises InvalidRequest; with `on_missing` leave_out, it has none.

        The call can be repeated, also with other arguments. Within the block it returns the turns that are complete so
        far. After the block it waits up to `timeout_s` seconds (at most 600) for the session to end. Raises
        RequestTimeout if the session does not end in that time, ValueError for an unknown style and before the start,
        and InvalidRequest for a discount that differs from that of `apply_reward_discount`.
        """
        check_style(style)
        if self.session_id is None:
            raise ValueError("session_id must be set before exporting interactions: use `async with` first")
        session_id, options = self.session_id, self._export_options(discount, credit)
        options["wait_s"] = 0.0 if self._is_open else timeout_s
        async with self._connected() as client:
            export = await client.export(session_id=session_id, **options)
            if not self._is_open and export.sessions[session_id]["status"] == "active":
                raise RequestTimeout(
                    f"session {session_id!r} has not ended within {timeout_s:g} s: end it, then export"
                )
            tree = await client.session_tree(session_id, results.INCLUDE)
        return STYLES[style](export, tree, on_missing)

    def _export_options(self, discount: float | None, credit: str | None) -> ExportOptions:
        if None not in (discount, self._discount) and discount != self._discount:
            raise InvalidRequest(
                f"'discount' is {discount}, but apply_reward_discount was called with {self._discount}; leave one out",
                param="discount",
            )
        options: ExportOptions = {"layout": "concat", "include": ["messages"], "reward_scope": "path"}
        options |= {"images": "bytes", "multi_modal_inputs": "auto"}
        if (chosen := self._discount if discount is None else discount) is not None:
            options["discount"] = chosen
        if credit is not None:
            options["credit"] = credit  # type: ignore[typeddict-item]  # the server checks words
        return options

    async def _run(self, steps: Steps[Any]) -> None:
        """Run an operation on the session, also outside of the block."""
        async with self._connected() as client:
            await client.run(steps)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncClient]:
        """The client of the block; outside the block, a client that is closed after use."""
        if self._client is not None:
            yield self._client
        else:
            async with AsyncClient(str(self.base_url), self._admin_api_key) as client:
                yield client

    async def _close(self) -> None:
        own, self._client = self._client, self._given
        if own is not None and own is not self._given:
            await own.aclose()


def check_style(style: str) -> None:
    """Raise ValueError for an unknown export style."""
    if style not in STYLES:
        raise ValueError(f"there is no export style {style!r}; the styles are {' and '.join(STYLES)}")


class Discounted:
    """The result of `apply_reward_discount`. Only awaiting it exports, so without `await` no request is made."""

    def __init__(self, client: OpenAIProxyClient) -> None:
        self._client = client

    def __await__(self) -> Generator[Any, None, Interactions]:
        return self._client.export_interactions().__await__()
