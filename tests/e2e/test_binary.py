"""`docker/build_binary` makes one file that serves, records and exports where there is no Python."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.store.migrations import head
from tests.e2e.bare_system import BareSystem
from tests.e2e.processes import ROOT
from tests.e2e.test_servers import Wire

# The build downloads the server's packages and takes minutes, which count as the first test's.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(900), pytest.mark.xdist_group("one-file program")]

PROGRAM = "/tokengrove"
DATABASE = ("--database-url", "sqlite:////tmp/served.db")
UNPACKED = "tmp/tokengrove-0"
SERVE = ("serve", "--port", "0")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The file, built once, and what its build printed."""
    output = tmp_path_factory.mktemp("binary") / "tokengrove"
    environment = {**os.environ, "PYTHON": sys.executable}
    ran = subprocess.run(
        [ROOT / "docker" / "build_binary", output], check=True, env=environment, stdout=subprocess.PIPE, text=True
    )
    return output, ran.stdout


@pytest.fixture(scope="module")
def bare(built: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> BareSystem:
    """A system without Python that has the file, which has unpacked itself."""
    system = with_program(tmp_path_factory.mktemp("bare"), built[0])
    assert "unpacking" in system.run(PROGRAM, "--help").stderr
    return system


@pytest.fixture
def fresh(built: tuple[Path, str], tmp_path: Path) -> BareSystem:
    """A system without Python where the file was never started."""
    return with_program(tmp_path / "root", built[0])


def with_program(root: Path, program: Path) -> BareSystem:
    system = BareSystem(root)
    os.link(program, f"{root}{PROGRAM}")
    return system


@contextmanager
def serving(process: subprocess.Popen[str]) -> Iterator[str]:
    """The address of a server that has been started; it is killed at the end."""
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if " at http://" in line:
                yield line.rsplit(" at ", 1)[1].strip()
                return
        raise AssertionError("".join(seen))
    finally:
        process.kill()
        process.communicate()


def serve(bare: BareSystem, *flags: str) -> subprocess.Popen[str]:
    return bare.start(PROGRAM, *SERVE, *DATABASE, *flags)


def turn(url: str, session: str = "s") -> Any:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    reply = httpx.post(f"{url}/{session}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_without_python_the_file_serves_records_exports_and_exits_on_sigterm(bare: BareSystem) -> None:
    process = serve(bare, "--engine", "scripted")
    with serving(process) as url:
        session = {"session_id": "s", "layout": "individual"}
        reply = turn(url)
        exported = httpx.post(f"{url}/export_trajectories", json=session).json()
        assert exported["samples"][0]["interaction_id"] == reply["id"]
        for name in ("areal", "npz", "safetensors"):
            assert httpx.post(f"{url}/trajectories/export", json={**session, "format": name}).status_code == 200
        for name in ("arrow", "parquet"):
            error = httpx.post(f"{url}/trajectories/export", json={**session, "format": name}).json()["error"]
            assert "the one-file build lacks it" in error["message"] and "pip install" not in error["message"]
        written = bare.run(PROGRAM, "export", "--url", url, "--session", "s", "-o", "/tmp/samples.jsonl")
        assert written.returncode == 0, written.stderr
        assert json.loads((bare.root / "tmp" / "samples.jsonl").read_text().splitlines()[0])["session_id"] == "s"
        # The process that was started is the server: its signals and its exit code are the server's.
        assert Path(f"/proc/{process.pid}/comm").read_text() == "tokengrove\n" and children(process.pid) == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    shown = bare.run(PROGRAM, "show", "s", *DATABASE)
    assert "└── 0 first, 15+5 tokens" in shown.stdout, shown.stderr  # without a locale, too


def test_the_file_contains_the_commands_and_the_migrations(bare: BareSystem) -> None:
    def run(*arguments: str, database: str = "commands.db") -> str:
        ran = bare.run(PROGRAM, *arguments, "--database-url", f"sqlite:////tmp/{database}")
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert head() in run("db", "upgrade")
    assert head() in run("db", "current")
    assert "0 findings" in run("db", "check")
    run("db", "prune", "--older-than", "1d", "--dry-run")
    run("export", "--all", "-o", "/tmp/dump.jsonl.zst")
    run("import", "/tmp/dump.jsonl.zst", database="restored.db")
    doctor = bare.run(PROGRAM, "doctor")
    assert doctor.returncode == 0 and "fastokens" in doctor.stdout and "minijinja" in doctor.stdout, doctor.stderr


@pytest.mark.parametrize("arguments", [SERVE, (*SERVE, "--engine", "sglang"), ("demo",), ("demo", "--train")])
def test_what_needs_torch_is_refused_by_a_line_that_says_the_way_out(bare: BareSystem, arguments: list[str]) -> None:
    ran = bare.run(PROGRAM, *arguments)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]  # after the steps of the start
    assert last.startswith("tokengrove: ") and "the one-file build lacks it" in last, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "pip install" not in ran.stderr


def test_the_file_serves_engine_servers(bare: BareSystem) -> None:
    wire = Wire()
    try:
        with serving(serve(bare, "--engine", wire.url)) as url:
            assert turn(url, "over-a-server")["usage"]["completion_tokens"] == 5
    finally:
        wire.kill()


def test_the_file_serves_the_mailbox(bare: BareSystem) -> None:
    with serving(serve(bare, "--engine", "mailbox")) as url, ThreadPoolExecutor(1) as agent:
        reply = agent.submit(turn, url, "by-mail")
        letter = httpx.post(f"{url}/mailbox/next", json={"wait_s": 60}, timeout=90).json()
        answer = {"request_id": letter["request_id"], "text": "hello"}
        assert httpx.post(f"{url}/mailbox/deliver", json=answer).status_code == 200
        assert reply.result(60)["choices"][0]["message"]["content"] == "hello"


def test_the_file_serves_with_workers_on_postgres(built: tuple[Path, str], tmp_path: Path, postgres_url: str) -> None:
    command = [built[0], "serve", "--port", "0", "--engine", "scripted", "--workers", "2", "--migrate"]
    process = subprocess.Popen(
        [*command, "--database-url", postgres_url],
        env={**BareSystem.environment({}), "XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    with serving(process) as url:
        workers = children(process.pid)
        assert len(workers) == 2
        ids = {turn(url)["id"] for _ in range(8)}
        assert {node["id"] for node in httpx.get(f"{url}/rl/sessions/s").json()["interactions"]} == ids
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_killed_server_leaves_no_process_and_no_files_but_the_program(bare: BareSystem) -> None:
    before = sorted((bare.root / UNPACKED).glob("program-*"))  # the first server writes the built-in model beside it
    process = serve(bare, "--engine", "scripted")
    with serving(process) as url:
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    left = {path.name for path in (bare.root / "tmp").iterdir()} - {"tokengrove-0", "served.db", "served.db-wal"}
    assert all(name.startswith(("served.db", "samples", "dump", "commands.db", "restored.db")) for name in left)
    assert sorted((bare.root / UNPACKED).glob("program-*")) == before
    assert "unpacking" not in bare.run(PROGRAM, "--help").stderr


def test_first_starts_at_the_same_time_unpack_one_program(fresh: BareSystem) -> None:
    with ThreadPoolExecutor(3) as starts:
        ran = list(starts.map(lambda _: fresh.run(PROGRAM, "--help"), range(3)))
    assert [each.returncode for each in ran] == [0, 0, 0]
    assert len(list((fresh.root / UNPACKED).iterdir())) == 1
    program = next((fresh.root / UNPACKED).iterdir())
    (program / "tokengrove").unlink()  # as cleaners of /tmp may do
    assert "unpacking" in fresh.run(PROGRAM, "--help").stderr
    assert (program / "tokengrove").exists()


def test_a_noexec_tmp_and_a_read_only_root_need_another_folder_once(fresh: BareSystem) -> None:
    noexec = 'mount -t tmpfs -o noexec tmpfs "$root/tmp"'
    refused = fresh.run(PROGRAM, "--help", mounts=noexec)
    assert refused.returncode == 1 and "XDG_CACHE_HOME" in refused.stderr
    (fresh.root / "cache").mkdir()
    assert fresh.run(PROGRAM, "--help", XDG_CACHE_HOME="/cache").returncode == 0
    locked = f'mount -o rbind "$root" "$root" && mount -o remount,bind,ro "$root" && {noexec}'
    ran = fresh.run(PROGRAM, "--help", mounts=locked, XDG_CACHE_HOME="/cache")
    assert ran.returncode == 0 and "unpacking" not in ran.stderr, ran.stderr
    assert list((fresh.root / "tmp").iterdir()) == []


def test_a_folder_in_tmp_that_somebody_else_made_is_not_used(fresh: BareSystem) -> None:
    (fresh.root / "elsewhere").mkdir()
    (fresh.root / UNPACKED).symlink_to("/elsewhere")
    refused = fresh.run(PROGRAM, "--help")
    assert refused.returncode == 1 and "cannot unpack" in refused.stderr
    assert list((fresh.root / "elsewhere").iterdir()) == []


def test_a_system_without_the_c_library_is_refused_by_its_name(fresh: BareSystem) -> None:
    loader = next(fresh.root.rglob("ld-linux*"))
    loader.unlink()
    refused = fresh.run(PROGRAM, "--help")
    assert refused.returncode == 1 and f"/{loader.relative_to(fresh.root)}" in refused.stderr


def test_the_build_names_the_newest_c_library_that_a_part_needs(built: tuple[Path, str], bare: BareSystem) -> None:
    named = re.search(r"needs the GNU C library 2\.(\d+) or later", built[1])
    parts = [path for path in next((bare.root / UNPACKED).glob("program-*")).rglob("*") if path.is_file()]
    symbols = subprocess.run(["objdump", "-T", *parts], capture_output=True, text=True).stdout
    assert named is not None and int(named[1]) == max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols))
    assert int(named[1]) <= int(os.confstr("CS_GNU_LIBC_VERSION").rpartition(".")[2])  # type: ignore[union-attr]
