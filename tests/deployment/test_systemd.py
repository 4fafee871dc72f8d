"""The unit of docs/deployment.md, with systemd's own tools, and run as it says by a process in systemd's place."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from proxy.serving import systemd
from proxy.serving.server import BACKSTOP_S
from proxy.settings import Settings
from proxy.store import schema
from tests.deployment.containers import Machine, shown
from tests.docs.pages import ROOT
from tests.support import free_port

ADMIN_KEY = "TOKENGROVE_ADMIN_KEY"


def unit() -> dict[str, str]:
    """The directives of the unit; the last one of a name counts."""
    lines = shown("tokengrove.service").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True)


def saved(folder: Path, name: str = "tokengrove.service") -> Path:
    """A unit in a file, with a program that exists."""
    path = folder / name
    path.write_text(shown(name).replace("/opt/tokengrove/bin/tokengrove", "/bin/true"))
    return path


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    names = ("tokengrove.service", "tokengrove-backup.service", "tokengrove-backup.timer")
    verified = analyze("verify", *(saved(tmp_path, name) for name in names))
    assert (verified.returncode, verified.stderr) == (0, "")


def test_a_misspelt_directive_would_be_found(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_text(path.read_text().replace("KillMode=", "KilMode="))
    assert "'KilMode' in section [Service]" in analyze("verify", path).stderr


def test_the_unit_may_do_little(tmp_path: Path) -> None:
    """systemd's measure of exposure: 0 (none) to 10; the unit without its restrictions has 9.2."""
    checked = analyze("security", "--offline=true", "--threshold=20", saved(tmp_path))
    if "unrecognized option" in checked.stderr:
        pytest.skip("this systemd-analyze knows no --offline")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.wide
def test_the_service_is_ready_once_it_listens_and_stops_in_its_time(tmp_path: Path) -> None:
    """A datagram on NOTIFY_SOCKET says that the start is complete."""
    assert unit()["Type"] == "notify" and unit()["KillMode"] == "mixed"
    assert float(unit()["TimeoutStopSec"]) > Settings().shutdown_timeout_s + BACKSTOP_S
    machine = Machine(tmp_path, free_port())
    machine.path(unit()["WorkingDirectory"]).mkdir(parents=True)
    variables = dict(line.split("=", 1) for line in shown("tokengrove.env").split())
    database = variables["TOKENGROVE_DATABASE_URL"].removeprefix("sqlite:///")
    assert Path(database).parent == Path(unit()["WorkingDirectory"]) == Path("/var/lib", unit()["StateDirectory"])
    given = {**variables, ADMIN_KEY: "k" * 16, systemd.VARIABLE: str(tmp_path / "notify")}
    program, *arguments = unit()["ExecStart"].split()
    container = {
        "command": [Path(program).name],
        "args": arguments,
        "env": [{"name": name, "value": value} for name, value in given.items()],
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(given[systemd.VARIABLE])
        manager.settimeout(120)
        with machine.running(container, {}) as process:
            assert manager.recv(100) == b"READY=1"
            assert httpx.get(f"http://127.0.0.1:{machine.port}/ready").status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(float(unit()["TimeoutStopSec"])) == 0
    assert machine.path(database).exists()


def test_the_backup_of_the_timer_is_a_file_of_the_day(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0)
    lines = [line.partition("=") for line in shown("tokengrove-backup.service").splitlines()]
    directives = {name: value for name, _, value in lines}
    folders = directives["StateDirectory"].split()
    for folder in folders:
        machine.path(f"/var/lib/{folder}").mkdir(parents=True)
    database = f"sqlite:///{tmp_path / 'kept.db'}"
    schema.upgrade(database)
    variables = [{"name": "TOKENGROVE_DATABASE_URL", "value": database}]
    for name in ("ExecStart", "ExecStartPost"):
        text = directives[name].replace("$$", "$").replace("%%", "%").replace("/opt/tokengrove/bin/", "")
        program, *arguments = shlex.split(text)
        machine.run({"command": [program], "args": arguments, "env": variables}, {})
    (made,) = machine.path(f"/var/lib/{folders[-1]}").iterdir()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d\.jsonl\.zst", made.name)


def test_an_upgrade_changes_the_program_of_every_unit(tmp_path: Path) -> None:
    """Also from one version's folder to the next; a backup by the older program would be refused."""
    names = ("tokengrove.service", "tokengrove-backup.service")
    page = (ROOT / "docs" / "deployment.md").read_text()
    (command,) = re.findall(r"^sed -i .*$", page, re.M)
    for name in names:
        (tmp_path / name).write_text(shown(name))
    for version in ("0.2.0", "0.3.0"):
        script = command.replace("/etc/systemd/system/", f"{tmp_path}/").replace("0.2.0", version)
        subprocess.run(["sh", "-c", script], check=True)
        for name in names:
            programs = re.findall(r"/opt/[^/]*/bin/tokengrove", (tmp_path / name).read_text())
            assert programs == [f"/opt/tokengrove-{version}/bin/tokengrove"]


def test_an_abstract_socket_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"tokengrove-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        monkeypatch.setenv(systemd.VARIABLE, f"@{name}")
        systemd.tell_ready()
        assert manager.recv(100, socket.MSG_DONTWAIT) == b"READY=1"


def test_a_manager_that_has_left_is_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(systemd.VARIABLE, str(tmp_path / "none"))
    systemd.tell_ready()
    assert "NOTIFY_SOCKET: No such file or directory" in caplog.text
