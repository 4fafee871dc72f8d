"""`tokengrove score`: the sessions that its flags select, what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from tests.e2e.processes import interruptible
from tests.support import real_server, user
from tokengrove import commands
from tokengrove.client import Client

HERE = "tests.unit.tokengrove.rollout.scorers_of_tests"
KEY = "secret-admin-key"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server with two ended sessions of one turn, and a live one."""
    with real_server(tmp_path, admin_key=KEY) as url, Client(url, KEY) as client:
        for name in ("a", "b", "live"):
            started = client.start_session("task", session_id=name, group_id=name)
            body = {"model": "m", "max_tokens": 3, "messages": [user("Go")]}
            headers = {"authorization": f"Bearer {started.api_key}"}
            reply = httpx.post(f"{url}/{name}/v1/chat/completions", json=body, headers=headers, timeout=60)
            assert reply.status_code == 200
            if name != "live":
                started.end()
        yield url


def score(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(
        commands.app, ["score", "--url", url, *arguments], env={"TOKENGROVE_ADMIN_KEY": KEY, "COLUMNS": "200"}
    )


def rewards(url: str) -> dict[str, Any]:
    with Client(url, KEY) as client:
        return {name: client.session_tree(name).interactions[0].rewards for name in ("a", "b", "live")}


def test_ended_sessions_are_scored_once(url: str) -> None:
    ran = score(url, f"{HERE}:first_only")
    assert (ran.exit_code, ran.stdout) == (
        0,
        "a: first_only 1\nb: first_only 1\n2 sessions, 2 scored, 0 calls failed\n",
    )
    assert score(url, f"{HERE}:first_only").stdout == "2 sessions, 0 scored, 0 calls failed\n"
    assert score(url, f"{HERE}:first_only", "--again").stdout.endswith("2 sessions, 2 scored, 0 calls failed\n")
    assert rewards(url) == {"a": {"first_only": 1.0}, "b": {"first_only": 1.0}, "live": {}}


def test_flags_select_the_sessions_and_json_is_a_line_for_each(url: str) -> None:
    ran = score(url, f"{HERE}:first_only", "--group", "live", "--json")
    assert json.loads(ran.stdout) == {"session_id": "live", "scores": {"first_only": 1.0}, "failures": []}


def test_a_call_that_fails_is_told_and_is_an_exit_code(url: str) -> None:
    ran = score(url, f"{HERE}:breaks", f"{HERE}:first_only", "--group", "a")
    assert (ran.exit_code, ran.stdout) == (1, "a: first_only 1\n1 sessions, 1 scored, 1 calls failed\n")
    assert ran.stderr == "tokengrove: a: scorer breaks: LookupError: the judge is away\n"


def test_following_goes_on_until_an_interrupt(url: str) -> None:
    with interruptible():
        ran = score(url, f"{HERE}:interrupts", "--follow", "--concurrency", "1")
    assert ran.exit_code == 130
    assert ran.stdout == "a: interrupts 1\n"
    assert rewards(url)["a"] == {"interrupts": 1.0}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((f"{HERE}:first_only", "--follow", "--again"), "--again would score the same turns for ever with --follow"),
        ((f"{HERE}:unmarked",), "does not say what it scores"),
        (("no_such_module:name",), "there is no module 'no_such_module'"),
        ((f"{HERE}:first_only", "--admin-key", "wrong"), "key"),
        ((f"{HERE}:first_only", "--url", "http://127.0.0.1:1"), "is the server running"),
    ],
)
def test_what_cannot_be_scored_is_one_line(url: str, arguments: tuple[str, ...], told: str) -> None:
    ran = score(url, *arguments)
    assert ran.exit_code == 1
    shown = ran.stderr or str(ran.exception)  # `main` prints a ConfigurationError
    assert told in shown
    assert shown.count("\n") <= 1
