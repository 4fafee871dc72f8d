"""The gateways, each in a file of its own."""

from __future__ import annotations

from benchmarks.gateways.agentlightning import AgentLightning
from benchmarks.gateways.areal import Areal
from benchmarks.gateways.base import Gateway
from benchmarks.gateways.litellm import Litellm
from benchmarks.gateways.passthrough import PassThrough
from benchmarks.gateways.rllm import Rllm
from benchmarks.gateways.tokengrove import Tokengrove

_ALL: tuple[Gateway, ...] = (PassThrough(), Tokengrove(), Rllm(), Litellm(), AgentLightning(), Areal())
GATEWAYS = {gateway.name: gateway for gateway in _ALL}
