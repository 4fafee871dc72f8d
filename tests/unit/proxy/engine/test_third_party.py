"""A third-party engine: a module in the current folder, `--engine module:Class`, and the contract on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proxy.engine.create import create_engine
from proxy.engine.servers.pool import Pool
from proxy.settings import Settings
from tokengrove.errors import ConfigurationError

ENGINE = '''
import asyncio, math
from proxy.engine.interface import Capability, EngineInfo
from tokengrove.errors import ContextLengthExceeded, EngineUnavailable
from proxy.engine.requests import check_request
from proxy.engine.chunks import TokenChunk
from tokengrove.reasons import FinishReason
from proxy.types import Logprobs, ids_of

class Counting:
    """Each token is the previous one plus 1."""

    def __init__(self, settings):
        self.settings, self.aborted = settings, set()

    async def start(self): ...
    async def close(self): ...
    async def pause(self, mode): ...
    async def resume(self): ...
    async def flush_cache(self): ...
    async def abort(self, request_id): self.aborted.add(request_id)
    async def update_weights(self, path, version=None): raise EngineUnavailable("no weights")
    async def transfer_weights(self, step, fields): raise EngineUnavailable("no weights")
    async def release_memory(self, tags=()): raise EngineUnavailable("no memory")
    async def resume_memory(self, tags=()): raise EngineUnavailable("no memory")

    def info(self):
        return EngineInfo("counting", "numbers", 640, 4096, 0, frozenset({Capability.STREAMING}))

    async def generate(self, request):
        check_request(request, 640, 4096)
        most, token = request.sampling.max_tokens, request.input_ids[-1]
        for left in range(most - 1, -1, -1):
            await asyncio.sleep(0)
            if request.request_id in self.aborted:
                yield TokenChunk(ids_of(), Logprobs("f"), 0, FinishReason.ABORT)
                return
            token = (token + 1) % 640
            stop = token in request.stop_token_ids and not request.sampling.ignore_eos
            finish = FinishReason.STOP if stop else None if left else FinishReason.LENGTH
            yield TokenChunk(ids_of([token]), Logprobs("f", [math.log(0.5)]), 0, finish)
            if finish:
                return
'''

SUITE = """
import pytest
from counting_engine import Counting
from proxy.engine.contract import CHECKS
from proxy.settings import Settings
from proxy.types import ids_of
import asyncio

@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check):
    async def run():
        engine = Counting(Settings())
        await engine.start()
        await check(engine, ids_of([1, 2, 3]))
    asyncio.run(run())
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in [name for name in sys.modules if name.startswith("counting_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def chosen(engine: str, *arguments: str):
    return create_engine(Settings(engine=engine, engine_arg=arguments), 640)


def test_an_engine_in_the_current_folder_is_loaded(elsewhere: Path) -> None:
    (elsewhere / "counting_engine.py").write_text(ENGINE)
    engine = chosen("counting_engine:Counting")
    assert engine.info().name == "counting" and engine.settings.engine == "counting_engine:Counting"


@pytest.mark.wide
def test_the_contract_runs_outside_of_the_project(elsewhere: Path) -> None:
    (elsewhere / "counting_engine.py").write_text(ENGINE)
    (elsewhere / "test_counting.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_counting.py"]
    project = str(Path(__file__).parents[4])
    done = subprocess.run(
        command, cwd=elsewhere, capture_output=True, text=True, env={"PYTHONPATH": project, "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0 and "20 passed" in done.stdout, done.stdout[-2000:] + done.stderr[-1000:]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("class Counting:\n    def __init__(self): ...", "cannot be created as CLASS"),
        ("class Counting:\n    def __init__(self, settings): ...", "it lacks start, generate, abort"),
        ("class Other: ...", "has no attribute 'Counting'"),
        ("class Counting(", "cannot be loaded"),
        ("import no_such_package_at_all", "No module named 'no_such_package_at_all'"),
    ],
)
def test_an_error_names_what_is_wrong_with_the_engine(elsewhere: Path, source: str, says: str) -> None:
    (elsewhere / "counting_wrong.py").write_text(source)
    with pytest.raises(ConfigurationError, match=says):
        chosen("counting_wrong:Counting")


def test_a_server_url_without_its_scheme_is_refused_with_the_scheme() -> None:
    with pytest.raises(ConfigurationError, match="http://localhost:30000"):
        chosen("localhost:30000")


@pytest.mark.parametrize("engine", ["http://h:port", "http://h:1,ftp://h", "http://key@h:1", "http://"])
def test_a_malformed_server_url_is_a_configuration_error(engine: str) -> None:
    with pytest.raises(ConfigurationError, match="--engine"):
        chosen(engine)


def test_servers_take_keys_and_no_unknown_option() -> None:
    assert isinstance(chosen("http://h:1", "api_key=a", "admin_api_key=b"), Pool)
    with pytest.raises(ConfigurationError, match="tp_size: an engine server has no option"):
        chosen("http://h:1", "tp_size=2")
