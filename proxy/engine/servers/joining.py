"""What all servers of a pool have in common, and how one that joins is brought to it and one that goes is let go.

A server that cannot be given the weights of the others stays out: its tokens would be another policy's.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from proxy.engine.interface import PauseMode
from proxy.engine.servers.placement import Member
from proxy.errors import EngineUnavailable, InvalidRequest, ProxyError

_PART_S = 5.0
"""How long a server that goes may take to hear that it is paused no more."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """`weights`: folder and version to load; none where they came from elsewhere. `managed`: the pool set the version.

    `released`: kinds of memory that the servers have given back.
    """

    mode: PauseMode | None = None
    weights: tuple[str, int] | None = None
    version: int = 0
    managed: bool = False
    released: frozenset[str] = frozenset()


async def bring(member: Member, state: PoolState, *, alone: bool) -> int:
    """Give a server the weights, the memory and the pause of `state`; the version that it serves then.

    One that is `alone` and cannot be given them sets the version. Raises EngineLost or EngineUnavailable.
    """
    version = await member.engine.check()
    if state.released:
        raise EngineUnavailable("memory is released; it joins after /engine/resume_memory")
    try:
        await _wake(member)
        if version != state.version and not (alone and state.weights is None):
            if state.weights is None:
                raise EngineUnavailable(f"{member.url} serves weight version {version}, the others {state.version}")
            version = await member.engine.update_weights(*state.weights)
        await _halt(member, state.mode)
    except EngineUnavailable:
        raise
    except ProxyError as error:
        raise EngineUnavailable(error.message) from None
    return version


async def part(member: Member) -> None:
    """Let go of a server. One that was paused from here goes on, or whoever takes it next would wait for ever."""
    if member.alive and member.paused and not member.released:
        with suppress(ProxyError, TimeoutError):  # it is gone, or hangs
            async with asyncio.timeout(_PART_S):
                await member.engine.resume()
        member.paused = False
    await member.engine.close()


async def _wake(member: Member) -> None:
    """Memory that it was told to release before it was lost."""
    if member.released:
        with suppress(InvalidRequest):  # it was restarted, and has all of it
            await member.engine.resume_memory()
        member.released = False


async def _halt(member: Member, mode: PauseMode | None) -> None:
    """Pause it by `mode`, or let it go on."""
    if mode is not None:
        member.paused = True
        await member.engine.pause(mode)
    elif member.paused:
        await member.engine.resume()
        member.paused = False
