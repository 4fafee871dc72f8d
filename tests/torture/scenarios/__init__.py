"""The scenarios. Importing this package registers all of them."""

from tests.torture.scenarios import (
    fair_pool,
    gate,
    leader_news,
    leader_restarts,
    recording,
    roll_queue,
    servers,
    turns,
    weights,
    writer,
)

__all__ = [
    "fair_pool",
    "gate",
    "leader_news",
    "leader_restarts",
    "recording",
    "roll_queue",
    "servers",
    "turns",
    "weights",
    "writer",
]
