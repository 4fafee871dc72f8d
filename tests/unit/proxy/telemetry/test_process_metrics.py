"""What the event loop and the connections of a server look like in its metrics."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest
from prometheus_client.core import Metric

from proxy.telemetry import process_metrics
from proxy.telemetry.process_metrics import ProcessMetrics
from tests.support import real_server, until


async def test_what_blocks_the_event_loop_is_seen_as_its_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_metrics, "_TICK_S", 0.01)
    metrics = ProcessMetrics()
    watching = asyncio.create_task(metrics.watch_loop())
    await asyncio.sleep(0)
    time.sleep(0.2)  # noqa: ASYNC251  # the whole loop waits
    await until(lambda: sum(metrics.lag.now()[()][0]) > 0)
    watching.cancel()
    assert metrics.lag.now()[()][1] > 0.1


def test_connections_are_shown_by_what_they_wait_for(tmp_path: Path) -> None:
    with real_server(tmp_path) as url, httpx.Client(base_url=url) as one, httpx.Client(base_url=url) as other:
        assert one.get("/health").status_code == 200
        text = other.get("/metrics").text
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tokengrove_connections"))
    states = {state: shown[f'tokengrove_connections{{state="{state}"}}'] for state in ("idle", "receiving", "replying")}
    assert states == {"idle": "1.0", "receiving": "0.0", "replying": "1.0"}
    assert float(shown["tokengrove_connections_limit"]) > 0


async def test_the_system_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, readers = ProcessMetrics(), list[threading.Thread]()
    collect = metrics._collector.collect

    def collected() -> Iterable[Metric]:
        readers.append(threading.current_thread())
        return collect()

    monkeypatch.setattr(metrics._collector, "collect", collected)
    await metrics.look()
    assert len(readers) == 1 and readers[0] is not threading.main_thread()
