"""An OTLP collector over HTTP, for tests: it keeps the spans that it is sent, or holds them and never answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class Collector:
    """`resources`: the attributes of those that spans came from. `reached`: set once spans have come."""

    url: str = ""
    answers: bool = True
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    reached: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def take(self, body: bytes) -> None:
        for each in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in each.resource.attributes})
            for scope in each.scope_spans:
                self.spans += scope.spans
        self.reached.set()
        if not self.answers:
            self.over.wait()


@contextlib.contextmanager
def collecting(*, answers: bool = True) -> Iterator[Collector]:
    """Run a collector during the block."""
    collector = Collector(answers=answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def handle_one_request(self) -> None:
            with contextlib.suppress(ConnectionError):  # a server that has ended reads no answer
                super().handle_one_request()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector
    finally:
        collector.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
