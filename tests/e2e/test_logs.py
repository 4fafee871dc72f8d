"""What a server process writes: with `--log-format json` nothing but JSON, from its start to its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import run, server_process
from tests.support import tiny_renderer, user
from tokengrove import __version__

JSON_LINES = ("--log-format", "json", "--engine", "scripted")


def said(output: str) -> list[dict[str, Any]]:
    """All lines as objects. Raises ValueError for one that is none."""
    return [json.loads(line) for line in output.splitlines()]


def test_all_that_a_server_prints_is_json(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "import logging, threading, warnings\n"
        "from proxy.engine.scripted.engine import ScriptedEngine\n"
        "from proxy.engine.scripted.scripts import babble\n"
        "def Engine(settings):\n"
        "    warnings.warn('an old\\nthing')\n"
        "    logging.getLogger('noisy').info('it is %s', 'loaded')\n"
        "    thread = threading.Thread(target=lambda: 1 / 0)\n"
        "    thread.start()\n"
        "    thread.join()\n"
        f"    return ScriptedEngine(babble(4, 300, 1), vocab_size={tiny_renderer().vocab_size})\n"
    )
    with server_process(tmp_path, *JSON_LINES[:2], "--engine", "noisy:Engine", python=sys.executable) as process:
        turn = httpx.post(
            f"{process.url}/s/v1/chat/completions",
            json={"model": "m", "max_tokens": 4, "messages": [user("hi")]},
            headers={"x-request-id": "step-1"},
            timeout=60,
        )
        assert (turn.status_code, turn.headers["x-request-id"]) == (200, "step-1")
        httpx.get(f"{process.url}/a%0Anothing")
        process.terminate()
        assert process.wait() == 0
    lines = {line["event"].partition(":")[0]: line for line in said(process.output)}
    assert {"time", "level", "logger", "event"} <= set.intersection(*(set(line) for line in lines.values()))
    assert (lines["started"]["url"], lines["started"]["version"]) == (process.url, __version__)
    assert (
        lines["turn"].items() >= {"session": "s", "request_id": "step-1", "output_tokens": 4, "level": "info"}.items()
    )
    assert lines["refused"]["http_status"] == 404 and "stopping" in lines
    assert "ZeroDivisionError" in lines["crash"]["traceback"]
    assert lines["it is loaded"]["logger"] == "noisy"
    assert any("an old\nthing" in line["event"] for line in lines.values())


def test_a_start_that_fails_is_a_line_of_json(tmp_path: Path) -> None:
    for flags in (("--port", "99999"), ("--database-url", "sqlite:///missing/base.db")):
        done = run("serve", *JSON_LINES, *flags, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        *_, last = said(done.stderr)
        assert (last["level"], last["event"]) == ("error", "start failed")
        assert flags[0] in last["error"] or "missing" in last["error"]
