"""The scenarios. Importing this package registers all of them."""

from tests.torture.scenarios import (
    claims,
    database,
    fair_pool,
    gate,
    keys,
    leader_news,
    leader_restarts,
    places,
    recording,
    replicas,
    roll_queue,
    servers,
    sessions,
    turns,
    weights,
    writer,
)

__all__ = [
    "claims",
    "database",
    "fair_pool",
    "gate",
    "keys",
    "leader_news",
    "leader_restarts",
    "places",
    "recording",
    "replicas",
    "roll_queue",
    "servers",
    "sessions",
    "turns",
    "weights",
    "writer",
]
