"""A server in a thread starts in time or says that it did not; its connections fit into the limit of open files."""

from __future__ import annotations

import errno
import gc
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.serving import server
from proxy.settings import Settings
from tokengrove.errors import ConfigurationError


def test_a_start_that_takes_too_long_is_said_and_its_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_START_TIMEOUT_S", 0.0)
    settings = Settings(port=0, engine="scripted", database_url=f"sqlite:///{tmp_path / 'late.db'}")
    with pytest.raises(ConfigurationError, match="did not start within 0 s"), server.serving(settings):
        pass
    assert "tokengrove-server" not in {thread.name for thread in threading.enumerate()}


def test_a_server_in_a_thread_leaves_the_garbage_collector_of_the_process_alone(tmp_path: Path) -> None:
    """What it froze would stay frozen after its end: a trainer has cycles, and searches for referrers (Hypothesis)."""
    before = gc.get_threshold(), list(gc.callbacks)
    settings = Settings(port=0, engine="scripted", database_url=f"sqlite:///{tmp_path / 'thread.db'}")
    with server.serving(settings):
        assert (gc.get_threshold(), list(gc.callbacks)) == before
    assert (gc.get_threshold(), list(gc.callbacks)) == before


@pytest.mark.parametrize(
    ("host", "port", "word"),
    [
        ("127.0.0.1", None, "choose another --port"),
        ("203.0.113.7", 0, "--host 203.0.113.7 is no address of this machine"),
        ("name.invalid", 0, "--host name.invalid is no address of this machine"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_refused_with_the_way_out(
    host: str, port: int | None, word: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(host=host, port=taken.getsockname()[1] if port is None else port, admin_key="k" * 16)
        with pytest.raises(ConfigurationError, match=f"cannot listen on {host}:.*{word}"):
            server.bind(settings.host, settings.port, "--port")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EADDRINUSE])
def test_a_port_that_needs_a_privilege_is_told_from_one_in_use(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, "refused")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigurationError, match="from 1024 on" if code == errno.EACCES else "another --port"):
        server.bind("127.0.0.1", 80, "--port")


@pytest.fixture
def few_files() -> Iterator[int]:
    """A limit of open files that leaves room for few connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, before[1]))
    yield 400
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_connections_fit_into_the_limit_of_open_files_beside_those_to_engine_servers(
    few_files: int, caplog: pytest.LogCaptureFixture
) -> None:
    def most(**settings: object) -> int:
        configured = Settings(**settings)  # type: ignore[arg-type]
        new = server.new_server(lambda *_: None, configured)  # type: ignore[arg-type, return-value]
        server.limit_connections({new: configured.max_connections}, configured)
        assert new.connections.most is not None
        return new.connections.most

    with caplog.at_level(logging.WARNING):
        assert most(engine="scripted", max_connections=20) == 20
        assert not caplog.messages
        alone, beside = most(engine="scripted"), most(engine="http://127.0.0.1:1")
    assert 2 * beside <= alone < few_files
    assert f"room for {alone} connections, not for --max-connections 8192" in caplog.text
