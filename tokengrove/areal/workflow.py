"""One episode of an agent, in AReaL's order: start a session, run the agent in it, set its reward, end it, export it.

After a failure the session ends as Failed with the reason, and its place on the server is free again. The agent
receives the addresses and the key of its own session only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, get_args

from tokengrove.areal.client import OpenAIProxyClient, check_style
from tokengrove.areal.group import current_group
from tokengrove.areal.interaction import InteractionWithTokenLogpReward
from tokengrove.areal.online import ended_sessions
from tokengrove.areal.rollout_workflow import RolloutWorkflow
from tokengrove.client import AsyncClient
from tokengrove.client.options import SessionFilter, SessionOptions
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.agent_call import call_agent, call_agent_here
from tokengrove.rollout.environment import agent_variables, placeholder_key
from tokengrove.rollout.episode import Overdue
from tokengrove.rollout.failure_log import FailedEpisode, FailureLog
from tokengrove.rollout.processes import shared_pool
from tokengrove.rollout.returned_rewards import returned_rewards
from tokengrove.rollout.script import stop_import
from tokengrove.rollout.session_start import unused_session_id

Mode = Literal["inline", "subproc", "online"]
Interactions = dict[str, InteractionWithTokenLogpReward]


class OpenAIProxyWorkflow(RolloutWorkflow):
    """Runs an agent: any object with `async def run(self, data, **extra)`, which calls the model with any client.

    Mode `inline` awaits `run` in this process, or calls it in a thread if it is a plain function. It passes `base_url`,
    `api_key` and `http_client`, as far as `run` accepts them. As in AReaL, `base_url` has no /v1, and both OpenAI's and
    Anthropic's SDKs accept it; it identifies the session, so any API key works. Mode `subproc` calls `run` in one of
    `subproc_max_workers` processes, where it may block, with the same arguments except `http_client` and with the
    environment variables of `tokengrove.rollout.environment`; agent and data must be picklable. Mode `online` runs no
    agent: an episode waits for the end of a session that is driven from outside and that `filter` selects, claims it,
    and returns its interactions. The server is its own gateway: `proxy_gateway_addr` is only used as the address if
    `proxy_addr` is missing.

    The arguments up to `proxy_gateway_addr` are AReaL's, in its order. `proxy_addr` is the server's address and
    `admin_api_key` its admin key, if it has one. Instead of both, `client` may be an `AsyncClient`, also one of an
    application in this process (`AsyncClient(app=...)`).

    `timeout_s`: seconds that an agent may run, or that an episode of mode `online` waits; None: no limit.
    `start_timeout_s`: seconds that an episode waits for a place on the server. `task_id`: the task of the sessions, by
    default `data["task_id"]` or the agent's class. `is_eval`: the sessions are validation sessions and never trained.
    `grant_capacity`: each episode grants the capacity for its own session, as in AReaL; False: it waits for a grant
    (`--capacity-control`). After `max_failed_episodes` failed episodes in a row `arun_episode` raises
    TooManyFailedEpisodes (default: three groups; -1: no limit); `failures` counts them. All other arguments are fields
    of `start_session`: `group_id`, `metadata`, `sampling`, `limits` and so on.

    Raises ValueError or TypeError for invalid arguments.
    """

    def __init__(
        self,
        mode: str = "inline",
        agent: Any | None = None,
        proxy_addr: str = "",
        admin_api_key: str | None = None,
        discount: float = 1.0,
        export_style: str = "individual",
        subproc_max_workers: int = 4,
        proxy_gateway_addr: str | None = None,
        *,
        client: AsyncClient | None = None,
        timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
        task_id: str | None = None,
        is_eval: bool = False,
        grant_capacity: bool = True,
        filter: SessionFilter | None = None,
        max_failed_episodes: int | None = None,
        **options: Any,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"Invalid mode: {mode}. Must be 'inline', 'subproc', or 'online'")
        check_style(export_style)
        _check_numbers(discount, timeout_s, start_timeout_s)
        _check_agent(agent, mode)
        if filter is not None and mode != "online":
            raise ValueError(f"filter selects the sessions of mode 'online'; mode {mode!r} starts its own")
        proxy_addr = proxy_addr or proxy_gateway_addr or ""
        if client is not None and (proxy_addr or admin_api_key is not None):
            raise ValueError("client has an address and a key: leave out proxy_addr and admin_api_key")
        if client is None and not proxy_addr.startswith(("http://", "https://")):
            raise ValueError(f"proxy_addr must be an address that begins with http://, not {proxy_addr!r}")
        if unknown := options.keys() - SessionOptions.__annotations__.keys():
            raise TypeError(f"OpenAIProxyWorkflow has no argument {min(unknown)!r}, and start_session has none either")
        if mode == "subproc":
            _check_reachable(client)
            shared_pool(subproc_max_workers)  # raises ValueError for an invalid number
        self.agent: Any = agent
        self.mode, self.proxy_addr = mode, proxy_addr
        self.discount, self.export_style, self.subproc_max_workers = discount, export_style, subproc_max_workers
        self.timeout_s, self.start_timeout_s, self.task_id = timeout_s, start_timeout_s, task_id
        self.filter = filter
        self.failures = FailureLog(max_failed_episodes)
        self._admin_api_key, self._client = admin_api_key, client
        if is_eval:
            options["metadata"] = {**options.get("metadata", {}), "validate": True}
        self._options = {**options, "grant_capacity": grant_capacity}

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Interactions | None:
        """Run an episode; return its interactions by id in order of completion, or None if the agent made no call.

        `engine` is not used. Exceptions of the agent are raised after the session has ended as Failed. Also raises
        TimeoutError after `timeout_s` seconds, TypeError and ValueError for a result that is not a reward, NotFound for
        the reward of an unknown id, TooManyRequests and ServerUnreachable if no session could start, and
        TooManyFailedEpisodes if too many episodes in a row failed or made no call.
        """
        stop_import()
        async with self._connected() as client:
            session = self._session(client, data)
            try:
                if self.mode == "online":
                    found = await self._wait(client)
                else:
                    found = await self._play(client, session, data)
            except Exception as error:
                self.failures.note(FailedEpisode.by(error, session.task_id, session.session_id or None))
                raise
        message = f"{self._who} made no call: there is nothing to train"
        silent = FailedEpisode("NoTurns", message, session.task_id, session.session_id or None)
        self.failures.note(silent if found is None else None)
        return found

    async def _play(self, client: AsyncClient, session: OpenAIProxyClient, data: dict[str, Any]) -> Interactions | None:
        async with session:
            run = self._run_in_process if self.mode == "subproc" else self._run_inline
            result = await run(client, session, data)
            rewarded = await _reward(client, session, returned_rewards(result, self._who))
        interactions = await self._exported(session)
        return interactions if rewarded and interactions else None

    async def _wait(self, client: AsyncClient) -> Interactions | None:
        """Wait for sessions that are driven from outside, and export them."""
        grants, found = self._options["grant_capacity"], Interactions()
        async with ended_sessions(client, self.filter, self.timeout_s, grants) as session_ids:
            for session_id in session_ids:
                session = OpenAIProxyClient(client=client, task_id=session_id)
                session.session_id = session_id
                found |= await self._exported(session)
        return found or None

    async def _exported(self, session: OpenAIProxyClient) -> Interactions:
        return await session.export_interactions(discount=self.discount, style=self.export_style)

    def close(self) -> None:
        """End the idle processes of mode subproc; a later episode would start new ones.

        Workflows with equal `subproc_max_workers` share their processes. Processes that run another workflow's agents
        are not ended.
        """
        if self.mode == "subproc":
            shared_pool(self.subproc_max_workers).close()

    async def __aenter__(self) -> OpenAIProxyWorkflow:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _run_inline(self, client: AsyncClient, session: OpenAIProxyClient, data: dict[str, Any]) -> Any:
        async with client.http_client() as http_client:
            extra = {**_addresses(session), "http_client": http_client}
            try:
                with placeholder_key():
                    return await session.episode.play(call_agent(self.agent.run, data, extra), self.timeout_s, "")
            except Overdue as error:
                raise self._overdue() from error.__cause__

    async def _run_in_process(self, client: AsyncClient, session: OpenAIProxyClient, data: dict[str, Any]) -> Any:
        pool, variables = shared_pool(self.subproc_max_workers), agent_variables(session.session)
        arguments = {"agent": self.agent, "data": data, "extra": _addresses(session)}
        try:
            return await pool.run(call_agent_here, variables=variables, timeout_s=self.timeout_s, **arguments)
        except TimeoutError as error:
            raise self._overdue() from error

    def _overdue(self) -> TimeoutError:
        return TimeoutError(f"{self._who} has not ended within {self.timeout_s:g} s (timeout_s)")

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncClient]:
        """The client of an episode: the caller's, or a client that is closed afterwards."""
        if self._client is not None:
            yield self._client
        else:
            async with AsyncClient(self.proxy_addr, self._admin_api_key) as client:
                yield client

    def _session(self, client: AsyncClient, data: Any) -> OpenAIProxyClient:
        """A session with an unused id, so that the start can be retried if its answer is lost."""
        given = data.get("task_id") if isinstance(data, Mapping) else None
        agent = "online" if self.agent is None else type(self.agent).__name__
        task_id = str(next(name for name in (self.task_id, given, agent) if name is not None))
        options = {"session_id": unused_session_id(task_id), **self._options}
        if (group_id := current_group()) is not None:
            options.setdefault("group_id", group_id)
        return OpenAIProxyClient(client=client, task_id=task_id, start_timeout_s=self.start_timeout_s, **options)

    @property
    def _who(self) -> str:
        return f"{type(self.agent).__name__}.run"


def _check_numbers(discount: float, timeout_s: float | None, start_timeout_s: float) -> None:
    """Raise ValueError for numbers that would otherwise be errors only after the agent has run."""
    if not 0 <= discount <= 1:
        raise ValueError(f"discount is {discount!r}; it must be between 0 and 1")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s!r}; it must be above 0, or None for no limit")
    if not start_timeout_s >= 0:
        raise ValueError(f"start_timeout_s is {start_timeout_s!r}; it must be 0 or more")


def _check_agent(agent: Any, mode: str) -> None:
    if mode == "online":
        if agent is not None:
            raise ValueError("mode 'online' runs no agent: it waits for sessions that others drive")
        return
    if agent is None:
        raise ValueError("agent is required when mode is 'inline' or 'subproc'")
    if isinstance(agent, type):
        raise TypeError(f"agent is the class {agent.__name__}; pass an instance")
    if not callable(getattr(agent, "run", None)):
        raise TypeError(f"Agent must have a callable 'run' method; {type(agent).__name__} has none")


def _check_reachable(client: AsyncClient | None) -> None:
    if client is not None and client.hold is not None:
        raise ValueError(
            "mode 'subproc' runs agents in other processes, which cannot reach an application in this one: use mode "
            "'inline', or serve the application (tokengrove serve) and give its address as proxy_addr"
        )


def _addresses(session: OpenAIProxyClient) -> dict[str, str]:
    """The address and key of a session, for its agent. Anthropic's SDK adds /v1; OpenAI's works without it."""
    return {"base_url": session.session_url, "api_key": session.session_api_key}


async def _reward(client: AsyncClient, session: OpenAIProxyClient, rewards: float | dict[str, float] | None) -> bool:
    """Set the rewards that the agent returned. False if a reward has no turn: then the session ends as NoData."""
    try:
        if isinstance(rewards, dict):
            if rewards:
                await session.session.set_reward(rewards=rewards)
        elif rewards is not None:
            await session.set_last_reward(rewards)
    except InvalidRequest:
        if (await client.session_tree(session.session.session_id)).interactions:
            raise
        await session.session.end(outcome="NoData", exit_reason="the agent made no call")
        return False
    return True
