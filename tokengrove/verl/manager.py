"""The trainer's interface to agent loops: it runs batches, and manages the memory of the engines between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from tokengrove.client import AsyncClient, operations
from tokengrove.client.adapters.verl import VerlBatch
from tokengrove.client.options import MemoryTag
from tokengrove.errors import EngineIncapable, InvalidRequest, ProxyError
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.verl.batches import Prompts, as_given, timed
from tokengrove.verl.servers import opened
from tokengrove.verl.worker import AgentLoopWorker, repeats

_logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_S = TypeVar("_S")
_R = TypeVar("_R")


def _awaited_or_run(
    method: Callable[Concatenate[_S, _P], Coroutine[Any, Any, _R]],
) -> Callable[Concatenate[_S, _P], Any]:
    """Make a method usable in both ways: on an event loop it returns an awaitable, elsewhere it blocks."""

    @wraps(method)
    def called(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> Any:
        steps = method(self, *args, **kwargs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass  # run below, so that this error is not the context of theirs
        else:
            return steps
        return asyncio.run(steps)

    return called


async def _warn_if_asleep(client: AsyncClient) -> None:
    """Warn if the samples of a batch will wait for memory. Other errors of the server are left to the samples."""
    try:
        state = await client.run(operations.engine(), retry_s=0.0)
    except ProxyError:
        return
    if state.released:
        _logger.warning(
            "the memory of the engine at %s is released (%s), and the samples wait for it: call wake_up(), or set "
            "actor_rollout_ref.rollout.free_cache_engine: true",
            client.url,
            ", ".join(state.released),
        )


class AgentLoopManager:
    """Runs batches in agent loops. `server_handles` (or `worker_group`, `llm_client`) and all other arguments are those
    of AgentLoopWorker.

    The methods block, or are awaited where an event loop runs. With `free_cache_engine` in the configuration, the
    engines have their memory only during `generate_sequences`, which resumes it before the batch and releases it after
    it, also if the batch fails. An engine that cannot release its memory keeps it, with a warning. Without
    `free_cache_engine`, samples wait for an engine whose memory is released, with a warning. The constructor calls no
    server: a trainer that needs the memory before its first batch calls `sleep`.
    """

    def __init__(
        self, config: object, server_handles: Any = None, *args: Any, worker_group: Any = None, **options: Any
    ) -> None:
        if worker_group is not None:
            if server_handles is not None:
                raise InvalidRequest("pass 'server_handles' or 'worker_group', not both", param="worker_group")
            server_handles = worker_group
        self.worker = AgentLoopWorker(config, server_handles, *args, **options)
        self.config, self.rollout_config = self.worker.config, self.worker.rollout_config

    @classmethod
    @_awaited_or_run
    async def create(cls, *args: Any, **kwargs: Any) -> AgentLoopManager:
        """Create a manager, as in verl 0.9: `await AgentLoopManager.create(...)`, or without `await`."""
        return cls(*args, **kwargs)

    @_awaited_or_run
    async def generate_sequences(self, prompts: Any) -> Any:
        """Like `AgentLoopWorker.generate_sequences`, with each sample `n` times (`val_kwargs.n` times in validations),
        unless its samples are already repeated (`Prompts.repeated`).

        `meta_info["timing"]` has the minimum, maximum and mean seconds of `agent_loop/generate_sequences`, `tool_calls`
        and `compute_score`, and those of the slowest sample.
        """
        given = Prompts.of(prompts)
        read = given.repeated(*repeats(self.rollout_config, given))
        if self.rollout_config.free_cache_engine:
            found = await self._with_memory(read)
        else:
            await self._each(_warn_if_asleep)
            found = await self.worker.run_batch(read)
        return as_given(timed(found), prompts)

    @_awaited_or_run
    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Give the engines all their memory back, whoever released it, or only the kinds in `tags`: with the weights
        alone, a trainer can send new weights.

        Raises EngineIncapable if an engine cannot release its memory.
        """
        await self._each(lambda client: client.resume_memory(tags))

    @_awaited_or_run
    async def sleep(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Release the memory of the engines, or only the kinds in `tags`, until `wake_up`. vLLM releases all or
        nothing.

        Raises EngineIncapable if an engine cannot release its memory, and InvalidRequest for `tags` that it cannot
        release alone.
        """
        await self._each(lambda client: client.release_memory(tags))

    async def _with_memory(self, prompts: Prompts) -> VerlBatch:
        try:
            await self._each(lambda client: client.resume_memory(), needed=False)
            found = await self.worker.run_batch(prompts)
        except BaseException:
            try:
                await to_the_end(self._release())
            except ProxyError as error:  # the first error is raised
                _logger.warning("the memory of an engine could not be released: %s", error)
            raise
        await to_the_end(self._release())
        return found

    async def _release(self) -> None:
        await self._each(lambda client: client.release_memory(), needed=False)

    async def _each(self, call: Callable[[AsyncClient], Coroutine[Any, Any, Any]], *, needed: bool = True) -> None:
        """Await `call` for all servers at once, then raise the first error. EngineIncapable is raised only if `needed`,
        and is otherwise a warning.
        """
        async with opened(self.worker.addresses) as servers:
            results = await asyncio.gather(*(call(server.control) for server in servers), return_exceptions=True)
        for result in results:
            if isinstance(result, EngineIncapable) and not needed:
                _logger.warning("free_cache_engine: an engine keeps its memory: %s", result)
            elif isinstance(result, BaseException):
                raise result
