"""The contract of executors, for those of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.executor_contract import KEY, PLACES, ExecutorContract
from tests.support import real_server
from tokengrove.client import AsyncClient
from tokengrove.rollout.executors import Executor, ExecutorOptions, executor_for


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("executors"), admin_key=KEY) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, KEY) as client:
        yield client


@pytest.fixture(scope="module", params=["local", "process"])
def options(request: pytest.FixtureRequest) -> ExecutorOptions:
    return ExecutorOptions(request.param, PLACES, workers=2 if request.param == "process" else None)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def executor(options: ExecutorOptions) -> AsyncIterator[Executor]:
    async with executor_for(options) as executor:
        yield executor


@pytest.mark.asyncio(loop_scope="module")
class TestOnThisMachine(ExecutorContract):
    """In this process, and in two others."""
