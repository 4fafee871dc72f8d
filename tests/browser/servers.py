"""Servers for the browser, in threads of this process, and the databases that they serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
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
    return _filled(folder, data.fill_kinds)


def images_database(folder: Path) -> str:
    """The URL of a new database with a session of a vision model."""
    return _filled(folder, data.fill_images)


def _filled(folder: Path, fill: Callable[[str], Coroutine[Any, Any, None]]) -> str:
    url = default_url(folder)
    # Playwright runs an event loop in the thread of the tests.
    with ThreadPoolExecutor(1) as threads:
        threads.submit(lambda: asyncio.run(fill(url))).result()
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


class Restarted:
    """A server that a test stops and starts again, at the same address and on the same database."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self._database_url, self._settings = default_url(folder), settings
        self._running = contextlib.ExitStack()
        self._port = 0
        self.start()

    def start(self, **settings: Any) -> None:
        """Start. `settings` replace those that were given at first."""
        self._settings |= settings
        self.url = self._running.enter_context(serving(self._database_url, port=self._port, **self._settings))
        self._port = int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        """Stop as SIGTERM does."""
        self._running.close()
