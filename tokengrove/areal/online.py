"""Sessions that are driven from outside: users or services start, reward and end them, and this side waits for one.

An ended session is leased to one episode, so that it is exported once. It is released if the episode fails.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tokengrove.client import AsyncClient, operations
from tokengrove.client.options import ClaimOptions, SessionFilter
from tokengrove.client.retries import LEAVE_S
from tokengrove.errors import ProxyError
from tokengrove.rollout.cancellation import to_the_end

_WAIT_S = 600.0
"""The longest wait that one request may ask for."""


@asynccontextmanager
async def ended_sessions(
    client: AsyncClient, which: SessionFilter | None, timeout_s: float | None, grants: bool
) -> AsyncIterator[list[str]]:
    """Wait for an ended session that `which` selects and nobody else has claimed; the block gets the session ids.

    The other sessions of its group come with it, if it was started with a `group_size`; failed sessions are left out.
    All are acknowledged after the block, or released if it raises. With `grants` the server may start one more session
    (`--capacity-control`); the grant is withdrawn if the wait fails. Raises TimeoutError after `timeout_s` seconds.
    """
    claim_id = f"online-{secrets.token_hex(8)}"
    if grants:
        await client.grant_capacity()
    try:
        async with asyncio.timeout(timeout_s):
            session_ids = await _claimed(client, which, claim_id)
    except BaseException as error:
        await to_the_end(_left(client, claim_id, grants))
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no session has ended within {timeout_s} s (timeout_s)") from error
        raise
    try:
        yield session_ids
    except BaseException:
        await to_the_end(_left(client, claim_id, grants=False))
        raise
    await client.acknowledge(claim_id)


async def _claimed(client: AsyncClient, which: SessionFilter | None, claim_id: str) -> list[str]:
    """Repeat the claim, always with the same id, until it contains a session."""
    while True:
        claim = await client.claim(filter=which, claim_id=claim_id, wait_s=_WAIT_S)
        if claim.sessions:
            return [name for name, entry in claim.sessions.items() if entry["outcome"] in (None, "Finished")]


async def _left(client: AsyncClient, claim_id: str, grants: bool) -> None:
    """Release the claim and withdraw the grant; if the server is unavailable, both are lost anyway."""
    with suppress(ProxyError):
        gone: ClaimOptions = {"claim_id": claim_id, "renew": True, "lease_s": 0.0}
        await client.run(operations.claim(None, gone), retry_s=LEAVE_S)
    with suppress(ProxyError):
        if grants:
            await client.run(operations.grant_capacity(-1), retry_s=LEAVE_S)
