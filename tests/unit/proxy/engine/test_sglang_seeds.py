"""SGLang servers take a seed, also if they do not promise equal tokens for equal seeds, or do not know seeds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from proxy.engine.contract import complete, request_for
from proxy.engine.interface import Capability
from proxy.engine.servers.sglang_server import SglangServer
from proxy.types import ids_of
from tests.engines.scripts import VOCABULARY
from tests.engines.wire import SglangWire, serving_wire

SEEDS = {Capability.SEED, Capability.DETERMINISTIC}


@pytest.mark.parametrize(
    ("told", "claimed", "sent"),
    [
        ({"enable_deterministic_inference": True}, SEEDS, 7),
        ({"enable_deterministic_inference": False}, {Capability.SEED}, 7),
        ({}, {Capability.SEED}, None),  # a server so old that it fails on a seed
    ],
)
async def test_a_server_gets_seeds_by_what_it_says_of_itself(
    told: Mapping[str, bool], claimed: set[object], sent: int | None
) -> None:
    async with serving_wire("sglang") as (url, wire):
        assert isinstance(wire, SglangWire)
        wire.deterministic = told
        engine = SglangServer(url, VOCABULARY)
        await engine.start()
        assert engine.info().capabilities & SEEDS == claimed
        await complete(engine, request_for(ids_of(range(40, 60)), 4, seed=7))
        assert wire.engine.requests[-1].sampling.seed == sent
        await engine.close()
