"""Other servers in front of the same engine server in the same run: CPU time of each for a turn and a streamed token.

The engine server is simulated and answers at once; each server gets the API that it forwards to. rllm-model-gateway
records what it forwards and does not tokenize; litellm's proxy only forwards. Each runs from an environment of its own,
as its documentation says, with logging at `warning`:

    pip install rllm-model-gateway==0.1.0        in one environment
    pip install 'litellm[proxy]==1.109.1'        in another

Run `python -m tests.bench.compare --rllm .rllm/bin/python --litellm .litellm/bin/python` from the root of the
repository. A server whose interpreter is not given is left out. No figure fails the bench."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.load import Conversation, Sent, Series, Words, new_path, sending, under_load
from tests.bench.overhead import assets_tokenizer, machine, remote_proxy
from tests.bench.servers import Server, on_core, server_process
from tests.bench.streaming import PACES, ROUNDS, SINGLE, Costs, set_pace
from tests.bench.streams import resident_mb
from tests.bench.upstream import Pace
from tests.support import free_port

IN_FLIGHT = 32
TURNS = 320
WARM_UP = 40
PHASE_S = 120.0
OURS = "tokengrove"
_sessions = count()


def rllm(python: Path, folder: Path, upstream: Server) -> AbstractContextManager[Server]:
    """Run rllm-model-gateway on a SQLite file."""
    port = free_port()
    arguments = ["-P", "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    arguments += ["--worker", f"{upstream.url}/v1", "--db-path", str(folder / "rllm.db")]
    return server_process(arguments, port, folder, python=python)


@contextmanager
def litellm(python: Path, folder: Path, upstream: Server) -> Iterator[Server]:
    """Run litellm's proxy with one worker process."""
    config, port = folder / "litellm.json", free_port()
    params = {"model": "openai/bench", "api_base": f"{upstream.url}/v1", "api_key": "none"}
    config.write_text(json.dumps({"model_list": [{"model_name": "bench", "litellm_params": params}]}))
    arguments = ["-P", "-m", "litellm.proxy.proxy_cli", "--config", str(config), "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--num_workers", "1"]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    offline["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"  # as our server, open on loopback
    with server_process(arguments, port, folder, python=python, **offline) as server:
        yield server


PEERS = {"rllm-model-gateway 0.1.0": rllm, "litellm 1.109.1 (proxy)": litellm}


def rllm_path() -> str:
    return f"/sessions/{next(_sessions)}/v1/chat/completions"


@dataclass(slots=True)
class Compared:
    """A server and its figures. `path` makes the path of the next request, in a session of its own."""

    server: Server
    path: Callable[[], str]
    turns: Series = field(default_factory=Series)
    streams: Costs = field(default_factory=Costs)


async def measure(servers: list[Compared], upstream: Server) -> None:
    """Run rounds of turns and of streams; each round asks all servers."""
    words = Words(0)
    for compared in servers:
        await under_load(compared.server, [sending(_turns(compared, words, WARM_UP))], Series(), PHASE_S)
    for _ in range(ROUNDS):
        await set_pace(upstream, Pace())
        for compared in servers:
            sent = _turns(compared, words, TURNS)
            works = [sending(sent[lane::IN_FLIGHT]) for lane in range(IN_FLIGHT)]
            await under_load(compared.server, works, compared.turns, PHASE_S)
        await set_pace(upstream, PACES[SINGLE])
        for compared in servers:
            await compared.streams.add(compared.server, compared.path, words)


def _turns(compared: Compared, words: Words, number: int) -> Sent:
    return [(compared.path(), Conversation(words).next_body()) for _ in range(number)]


def report(servers: dict[str, Compared], console: Console) -> None:
    table = Table(title=f"Turns: {IN_FLIGHT} in flight; streams: tokens that come alone", title_justify="left")
    table.add_column("server")
    for column in ("CPU ms a turn", "to ours", "turns/s", "CPU us a token", "to ours", "RSS MB"):
        table.add_column(column, justify="right")
    ours = servers[OURS]
    for name, one in servers.items():
        turn = [f"{one.turns.cpu_us / 1e3:.2f}", f"{one.turns.cpu_us / ours.turns.cpu_us:.1f}", f"{one.turns.rate:.0f}"]
        token = [f"{one.streams.token_us:.0f}", f"{one.streams.token_us / ours.streams.token_us:.1f}"]
        table.add_row(name, *turn, *token, f"{resident_mb(one.server):.0f}")
    console.print(table)


def run(pythons: dict[str, Path], tokenizer: Path | None, console: Console) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy, upstream = stack.enter_context(remote_proxy(folder, tokenizer))
        servers = {OURS: Compared(proxy, new_path)}
        for name, start in PEERS.items():
            if start.__name__ in pythons:
                server = stack.enter_context(start(pythons[start.__name__], folder, upstream))
                servers[name] = Compared(server, rllm_path if start is rllm else lambda: "/v1/chat/completions")
            else:
                console.print(f"left out: {name}, since --{start.__name__} names no interpreter", highlight=False)
        stack.enter_context(on_core(1))
        uvloop.run(measure(list(servers.values()), upstream))
        report(servers, console)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for start in PEERS.values():
        parser.add_argument(f"--{start.__name__}", type=Path, help="interpreter of its environment")
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    options = parser.parse_args()
    console = Console(width=max(120, Console().width))
    name = options.tokenizer.name if options.tokenizer else "built in"
    console.print(f"{machine()}, tokenizer {name}\n", highlight=False)
    pythons = {start.__name__: path for start in PEERS.values() if (path := getattr(options, start.__name__))}
    run(pythons, options.tokenizer, console)


if __name__ == "__main__":
    main()
