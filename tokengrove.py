"""The public names of the Python client: `from tokengrove import Client`."""

from proxy.client import (
    Acknowledged,
    AsyncClient,
    AsyncSession,
    Claim,
    Client,
    EngineServer,
    EngineState,
    Export,
    Generated,
    Sample,
    ServerEvent,
    ServerUnreachable,
    Session,
    SessionTree,
    TreeNode,
    read,
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
    "Sample",
    "ServerEvent",
    "ServerUnreachable",
    "Session",
    "SessionTree",
    "TreeNode",
    "read",
]
