"""The user-facing package of Tokengrove: its client, and the agents that it runs. The server is the package `proxy`.

`from tokengrove import Client`. Names are imported on first use, so a command imports only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokengrove.client import (
        Acknowledged,
        AsyncClient,
        AsyncSession,
        Claim,
        Client,
        EngineServer,
        EngineState,
        Export,
        Generated,
        ImageBytes,
        Sample,
        ServerEvent,
        ServerUnreachable,
        Session,
        SessionTree,
        TokenScores,
        TreeNode,
        read,
    )

__version__ = "1.0.0rc1"

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("tokengrove.client"), name)
