"""How long one agent's turns take while another sender asks for many choices, or sends many turns, at once.

The server has one core, the senders the other. Each line has the latencies of the victim's turns, one at a time, each
in a session of its own, and what the crowd got meanwhile. No figure fails the bench.

Run `python -m tests.bench.crowd [--choices 128] [--connections 1] [--engine scripted]` from the root of the
repository."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.load import Connection, Conversation, Words, new_path
from tests.bench.overhead import remote_proxy
from tests.bench.servers import Server, on_core, proxy_server

VICTIM, CROWD = "127.0.0.2", "127.0.0.3"
_BODIES = 64


@dataclass(slots=True)
class Crowd:
    """The requests of the sender that sends many. `choices`: of each; `connections`: how many at once; `address`: where
    it sends from; `one_session`: all are in one session, else each in its own."""

    choices: int
    connections: int
    address: str = CROWD
    one_session: bool = True
    answered: list[float] = field(default_factory=list)

    async def send(self, server: Server, bodies: list[bytes], until: float) -> None:
        """Send until that moment of the monotonic clock."""
        path = new_path()
        await asyncio.gather(*(self._send(server, path, bodies, until) for _ in range(self.connections)))

    async def _send(self, server: Server, path: str, bodies: list[bytes], until: float) -> None:
        connection = await _connect(server, self.address)
        while (began := time.monotonic()) < until:
            body = bodies[len(self.answered) % len(bodies)][:-1] + b',"n":%d}' % self.choices
            await connection.post(path if self.one_session else new_path(), body)
            self.answered.append(time.monotonic() - began)
        connection.close()


async def _victim(server: Server, bodies: list[bytes], until: float) -> list[float]:
    connection = await _connect(server, VICTIM)
    took: list[float] = []
    while (began := time.monotonic()) < until:
        await connection.post(new_path(), bodies[len(took) % len(bodies)])
        took.append(time.monotonic() - began)
        await asyncio.sleep(0.02)
    connection.close()
    return took


async def _connect(server: Server, address: str) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, "127.0.0.1", server.port, local_addr=(address, 0))
    return connection


async def measure(server: Server, crowd: Crowd, seconds: float) -> list[float]:
    """Return the latencies of the victim, in s."""
    words = Words(1)
    bodies = [Conversation(words).next_body() for _ in range(_BODIES)]
    until = time.monotonic() + seconds
    took, _ = await asyncio.gather(_victim(server, bodies, until), crowd.send(server, bodies, until))
    return took


@contextmanager
def _server(engine: str, folder: Path) -> Iterator[Server]:
    with ExitStack() as stack:
        if engine == "simulated":
            yield stack.enter_context(remote_proxy(folder, None))[0]
        else:
            yield stack.enter_context(proxy_server(folder, None, engine))


def _line(name: str, took: list[float], crowd: Crowd, seconds: float) -> str:
    ms = sorted(1000.0 * each for each in took)
    rate = len(crowd.answered) * crowd.choices / seconds
    return (
        f"{name}: {len(ms)} turns, p50 {ms[len(ms) // 2]:.0f} ms, p99 {ms[int(0.99 * len(ms))]:.0f} ms, "
        f"longest {ms[-1]:.0f} ms; the crowd got {rate:.0f} choices/s"
    )


async def _main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder, _server(options.engine, Path(folder)) as server, on_core(1):
        address = VICTIM if options.one_host else CROWD
        for name, crowd in {
            "alone": Crowd(1, 0),
            f"{options.connections} x n={options.choices}": Crowd(options.choices, options.connections, address),
            f"{options.turns} turns at once": Crowd(1, options.turns, address),
            f"{options.turns} turns at once, each in its session": Crowd(1, options.turns, address, one_session=False),
        }.items():
            print(_line(name, await measure(server, crowd, options.seconds), crowd, options.seconds), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.crowd")
    parser.add_argument("--choices", type=int, default=128, help="of each request of the crowd (128)")
    parser.add_argument("--connections", type=int, default=1, help="of the crowd, with so many choices each (1)")
    parser.add_argument("--turns", type=int, default=128, help="of one choice, at once (128)")
    parser.add_argument("--one-host", action="store_true", help="the crowd has the victim's address")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each line (15)")
    parser.add_argument("--engine", choices=("scripted", "simulated", "transformers"), default="scripted")
    asyncio.run(_main(parser.parse_args()))
