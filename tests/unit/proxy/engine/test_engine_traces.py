"""Engine servers continue the trace of a turn: they get its W3C headers, and none without a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.engine.contract import complete, request_for
from proxy.engine.servers.sglang_server import SglangServer
from proxy.engine.servers.vllm_server import VllmServer
from proxy.telemetry.timeline import Timeline
from proxy.telemetry.trace_context import TraceContext
from proxy.types import ids_of
from tests.engines.scripts import VOCABULARY
from tests.engines.wire import serving_wire
from tests.wide import CROSSED

PROMPT = ids_of(range(40, 60))


@CROSSED
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_an_engine_server_gets_the_trace_of_the_turn(kind: str, whole: bool) -> None:
    trace = TraceContext(trace_id=0xABC, span_id=1, flags=1, state="vendor=x")
    async with serving_wire(kind) as (url, wire):
        engine = SglangServer(url, VOCABULARY) if kind == "sglang" else VllmServer(url, VOCABULARY)
        await engine.start()
        request = replace(request_for(PROMPT, 4), whole=whole)
        await complete(engine, request)
        for _ in range(2):  # the rest of a request that was interrupted
            await complete(engine, replace(request, timeline=Timeline(trace=trace)))
        await engine.close()
    without, first, again = wire.headers
    assert not {"traceparent", "tracestate"} & set(without)
    assert first["traceparent"] == f"00-{0xABC:032x}-{trace.promised[request.request_id]:016x}-01"
    assert first["tracestate"] == "vendor=x"
    assert again["traceparent"] == first["traceparent"]
