"""A typed HTTP client for the server's own endpoints, blocking and for asyncio.

with Client(url).session("task") as session:
    run_agent(base_url=session.base_url, api_key=session.api_key)
    session.set_reward(1.0)
samples = Client(url).export(session_id=session.session_id).samples

`Client(app=app)` calls a server in the same process, without sockets.
"""

from tokengrove.client.async_client import AsyncClient, AsyncSession
from tokengrove.client.blocking_client import Client, Session
from tokengrove.client.export import Claim, Export
from tokengrove.client.images import ImageBytes
from tokengrove.client.readers.read import read
from tokengrove.client.server_events import ServerEvent
from tokengrove.client.unreachable import ServerUnreachable
from tokengrove.client.values import (
    Acknowledged,
    EngineServer,
    EngineState,
    Generated,
    Sample,
    SessionTree,
    TokenScores,
    TreeNode,
)

__all__ = [
    "Acknowledged",
    "AsyncClient",
    "AsyncSession",
    "Claim",
    "Client",
    "EngineServer",
    "EngineState",
    "Export",
    "Generated",
    "ImageBytes",
    "Sample",
    "ServerEvent",
    "ServerUnreachable",
    "Session",
    "SessionTree",
    "TokenScores",
    "TreeNode",
    "read",
]
