"""Servers for the browser, in threads of this process, and the databases that they serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proxy.serving import server
from proxy.settings import Settings
from tests.browser import data
from tests.support import default_url, shared_renderer

ADMIN_KEY = "the-admin-key-of-these-tests"


def kinds_database(folder: Path) -> str:
    """The URL of a new database with a session of every kind."""
    url = default_url(folder)
    # Playwright runs an event loop in the thread of the tests.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: asyncio.run(data.fill_kinds(url))).result()
    return url


def many_database(folder: Path, number: int) -> str:
    """The URL of a new database with `number` sessions of two turns."""
    url = default_url(folder)
    data.fill_many(url, number)
    return url


@contextlib.contextmanager
def serving(database_url: str, **settings: Any) -> Iterator[str]:
    """Serve a database on a free port, with an engine that acts as an agent; yield the URL."""
    given = {"port": 0, "engine": "scripted", "engine_arg": ("play=agent",), "log_level": "error", **settings}
    configured = Settings(database_url=database_url, **given)
    with shared_renderer(configured), server.serving(configured) as url:
        yield url
