"""The common state of a pool's servers (pause, weights, memory), and how a server joins and leaves the pool.

A server that cannot load the weights of the others does not join, since its tokens would come from another policy.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from proxy.engine.interface import PauseMode, tags_of
from proxy.engine.servers.placement import Member
from tokengrove.errors import EngineLost, EngineUnavailable, InvalidRequest, ProxyError

_PART_S = 5.0
"""Limit in seconds for resuming a server that leaves."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state that every joining server is brought to.

    `mode`: the pause in force, or None. `weights`: the folder and version to load; None if the weights came from a
    weight transfer or from outside of the pool. `version`: the weight version. `managed`: the pool set that version.
    `released`: the kinds of memory that are released.
    """

    mode: PauseMode | None = None
    weights: tuple[str, int] | None = None
    version: int = 0
    managed: bool = False
    released: frozenset[str] = frozenset()


async def bring(member: Member, state: PoolState, *, alone: bool, torn: bool = False) -> int:
    """Bring a server to the weights, memory and pause of `state`; return the weight version that it then serves.

    `alone`: no other server is alive; if `state` has no weights to load, the server keeps its own version. `torn`: its
    weights may differ from the version that it reports. Raises EngineLost, or EngineUnavailable if the server cannot
    join.
    """
    await member.engine.finish_update()
    version = await member.engine.check()
    if state.released:
        raise EngineUnavailable("memory is released; the server joins after POST /engine/resume_memory")
    try:
        await _wake(member)
        if (torn or version != state.version) and not (alone and state.weights is None):
            if state.weights is None and version == state.version:
                raise EngineUnavailable(f"{member.url} may lack parts of the weights; it joins after the next update")
            if state.weights is None:
                raise EngineUnavailable(
                    f"{member.url} serves weight version {version}, the others serve {state.version}"
                )
            version = await member.engine.update_weights(*state.weights)
        await _halt(member, state.mode)
    except EngineUnavailable:
        raise
    except ProxyError as error:
        raise EngineUnavailable(error.message) from None
    return version


async def follow(member: Member, state: PoolState, *, alone: bool) -> int:
    """Check that another process has brought a server to `state`; return the weight version that the server serves.

    Changes nothing on the server. `alone`: no other server is alive; the server may then have newer weights than
    `state`, loaded directly or by a process that died before it shared its state. Raises EngineLost, or
    EngineUnavailable if the server has other weights.
    """
    version = await member.engine.check()
    if version != state.version and not (alone and (version > state.version or not state.managed)):
        raise EngineUnavailable(f"{member.url} serves weight version {version}, the others serve {state.version}")
    member.paused, member.released = state.mode is not None, state.released
    await member.engine.follow(state.mode, None)
    return version


async def part(member: Member) -> None:
    """Close the connection to a server. If the pool paused it, resume it first, since no other client would.

    Even an ejected server may still answer.
    """
    if member.paused and not member.released:
        with suppress(ProxyError, TimeoutError):  # the server is lost or hangs
            async with asyncio.timeout(_PART_S):
                await member.engine.resume()
                member.paused = False
    await member.engine.close()


async def _wake(member: Member) -> None:
    """Resume the memory that the server released before it was lost.

    SGLang crashes if it resumes kinds that it has not released, so it is asked only once: either it resumes them, or it
    is restarted with all of its memory.
    """
    if member.released:
        kinds, member.released = member.released, frozenset()
        try:
            with suppress(InvalidRequest):  # the server was restarted and holds all its memory
                await member.engine.resume_memory(tags_of(kinds))
        except EngineLost as error:
            if not error.ran:
                member.released = kinds
            raise


async def _halt(member: Member, mode: PauseMode | None) -> None:
    """Pause the server in `mode`. If `mode` is None, resume the server if the pool paused it."""
    if mode is not None:
        member.paused = True
        await member.engine.pause(mode)
    elif member.paused:
        await member.engine.resume()
        member.paused = False
