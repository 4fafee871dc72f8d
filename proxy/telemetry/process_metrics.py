"""Metrics of the process: numbers of the system, the lag of the event loop, and resources that requests share.

With several workers the numbers of the system are sums, except for the start time, which is that of the youngest
worker, so that it shows a restart.
"""

from __future__ import annotations

import asyncio

from prometheus_client import ProcessCollector

from proxy.telemetry.families import SHORT_SECONDS, Counts, Gauge, Group, Histogram, Merge, Numbered
from tokengrove import __version__

_TICK_S = 0.25
"""Seconds between checks of the event loop. A longer block is always detected."""


class ProcessMetrics(Group):
    """Read from the system, and from the parts that manage memory limits, threads and connections."""

    def __init__(self) -> None:
        self.build = Gauge("tokengrove_build_info", "Always 1; the version is a label.", "version", merge=Merge.OWN)
        self.build.by = {(__version__,): 1}
        self.processes = Gauge("tokengrove_processes", "Processes of the server that answered (see --workers).")
        self.processes.by = {(): 1}
        self.lag = Histogram(
            "tokengrove_loop_lag_seconds",
            "Seconds that the event loop was late, looked at four times a second.",
            bounds=SHORT_SECONDS,
        )
        self.image_bytes = Gauge("tokengrove_image_memory_bytes", "Bytes of images that are held in memory.")
        self.body_bytes = Gauge("tokengrove_body_bytes", "Bytes of request bodies that are held.")
        self.body_room = Gauge("tokengrove_body_bytes_limit", "Bytes of request bodies that may be held at once.")
        self.work = Gauge(
            "tokengrove_work_waiting", "Pieces of work that wait for a thread, by kind: render or body.", "kind"
        )
        self.connections = Gauge(
            "tokengrove_connections",
            "Connections of clients, by state: idle, receiving, replying or unread.",
            "state",
        )
        self.most_connections = Gauge(
            "tokengrove_connections_limit", "Connections of clients that may be open at once."
        )
        self._collector = ProcessCollector(registry=None)
        self.cpu = Counts("process_cpu_seconds", "Seconds of processor time, of the user and the system.")
        self.memory = Gauge("process_resident_memory_bytes", "Resident memory in bytes.")
        self.virtual_memory = Gauge("process_virtual_memory_bytes", "Virtual memory in bytes.")
        self.open_files = Gauge("process_open_fds", "Open file descriptors.")
        self.most_files = Gauge("process_max_fds", "File descriptors that may be open at once.")
        self.start = Gauge("process_start_time_seconds", "Start of the process, Unix seconds.", merge=Merge.MOST)
        system = (self.cpu, self.memory, self.virtual_memory, self.open_files, self.most_files, self.start)
        self._system: dict[str, Numbered] = {family.name: family for family in system}

    async def look(self) -> None:
        """Read all numbers of the system. Numbers that the system does not provide are not shown.

        This runs in a thread, since the system lists each open file, of which there may be tens of thousands.
        """
        for metric in await asyncio.to_thread(lambda: list(self._collector.collect())):
            if (family := self._system.get(metric.name)) is not None:
                family.by[()] = metric.samples[0].value

    async def watch_loop(self) -> None:
        """Measure the lag of the event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lag.observe(max(loop.time() - due, 0.0))
