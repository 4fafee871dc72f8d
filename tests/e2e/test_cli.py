"""The command line: `serve` prints what it serves; any failure is one line of error and a non-zero exit code."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import ROOT, execute, run, server_process
from tests.support import free_port, user


def assert_one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    *steps, line = done.stderr.strip().splitlines()
    assert not any(step.startswith("tokengrove: ") for step in steps), steps
    assert line.startswith("tokengrove: ")
    assert all(word in line for word in words), line


def test_without_arguments_the_built_in_model_is_served_and_named(tmp_path: Path) -> None:
    with server_process(tmp_path, python=sys.executable) as process:
        body = {"model": "any", "max_tokens": 4, "messages": [user("hello")]}
        reply = httpx.post(f"{process.url}/try-1/v1/chat/completions", json=body, timeout=60).json()
        assert reply["usage"]["completion_tokens"] <= 4
        process.terminate()
        assert process.wait() == 0
    for word in ("tokengrove-tiny", "transformers", "noise", "served.db", "curl"):
        assert word in process.output
    assert (tmp_path / "served.db").exists()


def test_a_port_in_use_is_one_line_of_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = execute("serve", "--engine", "scripted", "--port", port, cwd=tmp_path)
    assert_one_line(done, port, "--port")


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_folder_without_a_model_is_one_line_of_error(tmp_path: Path, folder: str) -> None:
    assert_one_line(run("serve", "--port", "0", "--model", folder, cwd=tmp_path), "--model", folder)


def test_a_database_newer_than_the_code_is_one_line_of_error(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "new.db") as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    connection.close()
    flags = ("--engine", "scripted", "--port", "0", "--database-url", "sqlite:///new.db")
    assert_one_line(run("serve", *flags, cwd=tmp_path), "newer", "9999")


@pytest.mark.parametrize("url", ["sqlite:///missing/folder/x.db", "sqlite:///.", "mysql://x/y", "nonsense"])
def test_a_database_that_cannot_be_opened_is_one_line_of_error(tmp_path: Path, url: str) -> None:
    flags = ("--engine", "scripted", "--port", "0", "--database-url", url)
    assert_one_line(run("serve", *flags, cwd=tmp_path))


def test_a_second_server_on_one_database_is_one_line_of_error(tmp_path: Path) -> None:
    with server_process(tmp_path, "--engine", "scripted"):
        flags = ("--engine", "scripted", "--port", "0", "--database-url", "sqlite:///served.db")
        assert_one_line(run("serve", *flags, cwd=tmp_path), "served.db")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--host", "0.0.0.0"), "--admin-key"),
        (("--engine", "warp"), "--engine"),
        (("--engine", "scripted", "--engine-arg", "speed=9"), "speed"),
        (("--engine", "no.such:Engine"), "no.such"),
        (("--engine", "scripted", "--family", "none-such"), "qwen3"),
    ],
)
def test_an_invalid_setting_is_one_line_of_error(tmp_path: Path, flags: tuple[str, ...], word: str) -> None:
    assert_one_line(run("serve", "--port", "0", *flags, cwd=tmp_path), word)


def test_a_value_from_a_variable_or_a_file_is_refused_with_its_place_also_late(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('engine = "scripted"\nengine_arg = ["speed=9"]\n')
    done = run("serve", "--port", "0", cwd=tmp_path, TOKENGROVE_CONFIG="own.toml", TOKENGROVE_TOKENIZER="nowhere")
    assert_one_line(done, "--tokenizer nowhere", "(--tokenizer is TOKENGROVE_TOKENIZER)")
    done = run("serve", "--port", "0", "--config", "own.toml", cwd=tmp_path)
    assert_one_line(done, "speed", "(--engine-arg is engine_arg in own.toml, line 2)")


def test_a_server_starts_among_the_variables_of_a_kubernetes_service_of_its_name(tmp_path: Path) -> None:
    links = {"TOKENGROVE_PORT": "tcp://10.0.0.1:80", "TOKENGROVE_PORT_80_TCP_ADDR": "10.0.0.1", "TOKENGROVE_MODEL": ""}
    done = run("serve", "--print-config", cwd=tmp_path, **links, TOKENGROVE_SERVICE_HOST="10.0.0.1")
    assert done.returncode == 0 and "port = 8080  # default" in done.stdout.splitlines()


def test_doctor_tells_its_steps_on_stderr_only(tmp_path: Path) -> None:
    done = run("doctor", cwd=tmp_path)
    assert done.returncode == 0
    assert "loading the tokenizer" in done.stderr and "loading the tokenizer" not in done.stdout
    assert "loading" not in done.stdout and "family" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--all", "--group", "g"), ("--group", "--url")),
        (("--all", "--format", "npz"), ("--format", "--url")),
        (("--all", "--mask-unfinished"), ("--mask-unfinished", "--url")),
        (("--all", "--require-complete"), ("--require-complete", "--url")),
        (("--url", "http://127.0.0.1:1", "--database-url", "sqlite:///x.db"), ("--database-url", "--all")),
    ],
)
def test_a_flag_of_the_other_kind_of_export_is_one_line_of_error_and_writes_nothing(
    tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_one_line(run("export", "-o", "out", *flags, cwd=tmp_path), *words)
    assert list(tmp_path.iterdir()) == []


def test_with_an_admin_key_the_banner_shows_how_to_start_and_control_actions_leave_lines(tmp_path: Path) -> None:
    flags = ("--engine", "scripted", "--admin-key", "kept-to-itself", "--log-level", "error")
    with server_process(tmp_path, *flags) as process:
        httpx.delete(f"{process.url}/rl/sessions/s", headers={"authorization": "Bearer kept-to-itself"})
        process.terminate()
        assert process.wait() == 0
    [command] = [line.split("try", 1)[1].strip() for line in process.output.splitlines() if " try " in line]
    assert command.split()[:3] == ["curl", "-s", f"{process.url}/rl/start_session"]
    [line] = [line for line in process.output.splitlines() if " audit " in line]
    assert "action=session.delete session=s by=admin" in line and " status=404 " in line
    assert "kept-to-itself" not in process.output


@pytest.mark.parametrize("flags", [(), ("--no-page",)])
def test_the_banner_says_where_the_page_is_if_there_is_one(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with server_process(tmp_path, "--engine", "scripted", *flags) as process:
        status = httpx.get(f"{process.url}/ui").status_code
        process.terminate()
        assert process.wait() == 0
    assert status == (404 if flags else 200)
    assert (f"  page      {process.url}/ui\n" in process.output) is (not flags)


@pytest.mark.parametrize(
    ("level", "events"), [("info", {"refused"}), ("debug", {"turn", "request", "refused", "prompt"})]
)
def test_at_the_level_info_a_person_reads_only_of_what_failed_or_was_refused(
    tmp_path: Path, level: str, events: set[str]
) -> None:
    with server_process(tmp_path, "--engine", "scripted", "--log-level", level) as process:
        body = {"model": "m", "max_tokens": 4, "messages": [user("hi")]}
        assert httpx.post(f"{process.url}/s/v1/chat/completions", json=body).status_code == 200
        assert httpx.post(f"{process.url}/s/rl/set_reward", json={"reward": 1.0}).status_code == 200
        assert httpx.post(f"{process.url}/s/rl/set_reward", json={"reward": "much"}).status_code == 400
        process.terminate()
        assert process.wait() == 0
    told = {line.split()[2] for line in process.output.splitlines() if "session=s" in line}
    assert told == events


def test_a_server_that_waits_for_its_engine_says_for_what_and_whose_tokenizer_it_uses(tmp_path: Path) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    ran = run("serve", "--engine", dead, "--engine-arg", "start_timeout_s=0.1", "--port", "0", cwd=tmp_path)
    assert "without --model, prompts are encoded with the tokenizer of the built-in model" in ran.stderr
    assert f"no engine server answers yet; waiting up to 0.1 s ({dead} does not answer" in ran.stderr


@pytest.mark.parametrize("command", [("show",), ("show", "some-session"), ("db", "check")])
def test_a_folder_without_a_database_is_one_line_of_error_and_stays_empty(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert_one_line(run(*command, cwd=tmp_path), "there is no database", "--database-url")
    assert list(tmp_path.iterdir()) == []


def test_a_third_party_engine_is_loaded_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from proxy.engine.scripted.engine import ScriptedEngine\n"
        "from proxy.engine.scripted.scripts import babble\n"
        "def Engine(settings):\n"
        "    return ScriptedEngine(babble(8, 300, 8), vocab_size=300, model='mine')\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    code = "from proxy.engine.create import create_engine; from proxy.settings import Settings; "
    code += "print(create_engine(Settings(engine='mine:Engine'), 300).info().model)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "mine"


@pytest.mark.parametrize("package", ["torch", "transformers", "openai"])
@pytest.mark.parametrize("flags", [(), ("--train",)])
def test_without_the_extra_the_demo_says_the_line_that_needs_no_installation(
    tmp_path: Path, package: str, flags: tuple[str, ...]
) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from tokengrove.commands import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, "demo", *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    line = " ".join(["uvx --from 'tokengrove[cpu]' tokengrove demo", *flags])
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"tokengrove: the demo needs the package {package}, of the extra cpu: {line}\n"
