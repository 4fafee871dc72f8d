"""`tokengrove show` without a session: the newest sessions or groups, from a server and from its database alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.support import assistant, default_url, real_server, user
from tokengrove import commands
from tokengrove.client import Client, operations

HOSTILE = "[red]g[/]<b>\u202e"
WIDE = {"COLUMNS": "200", "TOKENGROVE_DATABASE_URL": "", "TOKENGROVE_ADMIN_KEY": ""}
KEY = "secret-admin-key"
SCORER = "tests.unit.tokengrove.rollout.scorers_of_tests:first_only"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The flags that read a server, and those that read its database."""
    folder = tmp_path_factory.mktemp("lists")
    with real_server(folder, engine_arg=("play=agent",), admin_key=KEY) as url:
        with Client(url, KEY) as client:
            for number in range(4):
                with client.session(
                    f"task-{number}", group_id=HOSTILE if number == 3 else "g", metadata={"step": number}
                ) as session:
                    _play(session.base_url, session.api_key, edited=number == 1)
                    session.set_reward(number / 4)
            client.start_session("waits", session_id="live")
        yield f"--url {url} --admin-key {KEY}", f"--database-url {default_url(folder)}"


def _play(base_url: str, api_key: str, *, edited: bool) -> None:
    messages: list[Any] = [user("Say exactly: one")]
    for _ in range(2):
        body = {"model": "m", "max_tokens": 32, "messages": messages}
        headers = {"authorization": f"Bearer {api_key}"}
        reply = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=60).json()
        messages += [assistant("edited") if edited else reply["choices"][0]["message"], user("Say exactly: two")]


def _show(*arguments: str, **environment: str) -> str:
    ran = CliRunner().invoke(commands.app, ["show", *arguments], env={**WIDE, **environment})
    assert ran.exit_code == 0, (ran.output, ran.stderr)
    return ran.output


def _ids(listed: str) -> list[str]:
    return [json.loads(line)["session_id"] for line in listed.splitlines()]


FLAGS: list[tuple[str, list[str]]] = [
    ("", ["live", "task-3-0", "task-2-0", "task-1-0", "task-0-0"]),
    ("--limit 2", ["live", "task-3-0"]),
    ("--group g", ["task-2-0", "task-1-0", "task-0-0"]),
    ("--task task-1", ["task-1-0"]),
    ("--status active", ["live"]),
    ("--reward-min 0.25 --reward-max 0.5", ["task-2-0", "task-1-0"]),
    ("--reward-max 0", ["task-0-0"]),
    ("--version 0 --limit 1", ["live"]),
    ("--version 7", []),
    ("--purpose title", []),
    ("--forked", ["task-1-0"]),
    ("--search ASK-2", ["task-2-0"]),
    ("--order reward --limit 3", ["task-0-0", "task-1-0", "task-2-0"]),
    ("--order -reward", ["task-3-0", "task-2-0", "task-1-0", "task-0-0", "live"]),
    ("--order oldest --limit 1", ["task-0-0"]),
    ("--order metadata.step --metadata step>=2", ["task-2-0", "task-3-0"]),
    ("--metadata step=1", ["task-1-0"]),
    ("--trained-in grpo/1", []),
]


@pytest.mark.parametrize(("flags", "ids"), FLAGS)
def test_each_flag_selects_the_same_sessions_of_a_server_and_of_its_database(
    served: tuple[str, str], flags: str, ids: list[str]
) -> None:
    server, database = (_show("--json", *flags.split(), *place.split()) for place in served)
    assert _ids(server) == ids
    assert server == database


def test_the_table_has_a_line_for_each_session_and_counts_beneath(served: tuple[str, str]) -> None:
    server, database = (_show(*place.split()).splitlines() for place in served)
    assert [line.split()[:6] for line in server[:3]] == [
        ["session", "status", "turns", "forks", "tokens", "score"],
        ["live", "active", "0", "0", "0", "-"],
        ["task-3-0", "ended", "2", "0", "80", "0.75"],
    ]
    assert server[-1] == "5 listed (1 active, 4 ended)"
    assert [line.split()[:6] for line in database] == [line.split()[:6] for line in server]


def test_what_is_not_listed_is_told(served: tuple[str, str]) -> None:
    assert _show("--limit", "1", *served[1].split()).endswith("1 listed (1 active, 4 ended); --limit lists more\n")
    assert _show("--search", "nothing", *served[1].split()) == "no session matches\n"
    expired = _show("--status", "expired", *served[1].split())
    assert expired == "no session matches; with another status: 1 active, 4 ended\n"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_a_table_is_never_wider_than_the_terminal(served: tuple[str, str], width: int) -> None:
    for flags in ([], ["--groups"]):
        lines = _show(*flags, *served[1].split(), COLUMNS=str(width)).splitlines()
        assert max(map(len, lines)) <= width
        assert any("task-3-0" in line or HOSTILE[:4] in line for line in lines)


def test_names_of_an_agent_act_on_no_terminal_and_are_no_markup(served: tuple[str, str]) -> None:
    for listed in (_show(*served[1].split()), _show("--groups", *served[1].split())):
        assert "[red]g[/]<b>·" in listed
        assert "\u202e" not in listed


@pytest.mark.parametrize("flags", ["--group g", "--task task-1", "--limit 1", "--search live"])
def test_flags_select_the_same_groups_of_a_server_and_of_its_database(served: tuple[str, str], flags: str) -> None:
    server, database = (_show("--groups", "--json", *flags.split(), *place.split()) for place in served)
    assert server == database
    groups = [json.loads(line)["group_id"] for line in server.splitlines()]
    assert groups == {"--limit 1": [HOSTILE], "--search live": []}.get(flags, ["g"])


def test_groups_have_the_distribution_of_their_scores(served: tuple[str, str]) -> None:
    server, database = (_show("--groups", "--json", *place.split()) for place in served)
    assert server == database
    groups = [json.loads(line) for line in server.splitlines()]
    assert [(group["group_id"], group["scores"]) for group in groups] == [(HOSTILE, [0.75]), ("g", [0.0, 0.25, 0.5])]
    table = _show("--groups", *served[1].split()).splitlines()
    assert [line.split()[1:4] for line in table[:-1]] == [
        ["sessions", "mean", "std"],
        ["1", "0.75", "-"],
        ["3", "0.25", "0.25"],
    ]
    assert table[-1] == "2 groups"


REFUSED: list[tuple[str, str]] = [
    ("--status gone", "--status must be one of active, ended, expired"),
    ("--purpose odd", "--purpose must be one of"),
    ("--reward-min nan", "--reward-min"),
    ("--groups --forked", "--forked selects sessions, not groups"),
    ("--turn 3", "--turn needs the id of a session"),
    ("--samples", "--samples needs the id of a session"),
    ("live --limit 3", "--limit is for lists of sessions"),
    ("live --groups", "--groups is for lists of sessions"),
    ("live --tokens", "--tokens applies only with --turn"),
    ("live --whole", "--whole applies only with --turn"),
    ("live --turn 0 --by mask", "--by applies only with --tokens"),
    ("live --layout tree", "--layout applies only with --samples or --tokens"),
    ("live --turn 0 --samples", "give it without --samples"),
    ("live --turn 9", "there is no turn '9'"),
]


@pytest.mark.parametrize(("flags", "told"), REFUSED)
def test_what_has_no_effect_or_is_refused_is_one_line(
    served: tuple[str, str], flags: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in served:
        monkeypatch.setattr("sys.argv", ["tokengrove", "show", *flags.split(), *place.split()])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        error = capsys.readouterr().err
        assert ended.value.code == 1
        assert told in error and error.count("\n") == 1, error


def test_a_wrong_key_is_one_line(
    served: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = served[0].split()[1]
    for flags in (
        ["show"],
        ["show", "live"],
        ["show", "--groups"],
        ["watch"],
        ["watch", "--once"],
        ["watch", "--json"],
    ):
        monkeypatch.setattr("sys.argv", ["tokengrove", *flags, "--url", url, "--admin-key", "wrong"])
        with pytest.raises(SystemExit):
            commands.main()
        error = capsys.readouterr().err
        assert error.startswith(f"tokengrove: {url}: ") and "key" in error and error.count("\n") == 1


def test_an_empty_database_has_no_session(tmp_path: Path, served: tuple[str, str]) -> None:
    url = f"sqlite:///{tmp_path / 'none.db'}"
    ran = CliRunner().invoke(commands.app, ["db", "upgrade", "--database-url", url])
    assert ran.exit_code == 0
    assert _show("--database-url", url) == "no session matches\n"
    assert _show("--groups", "--database-url", url) == "no group matches\n"


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("", "the server needs its admin key: give --admin-key KEY, or set TOKENGROVE_ADMIN_KEY"),
        ("another", "--admin-key (or TOKENGROVE_ADMIN_KEY) is not the admin key of this server"),
    ],
)
@pytest.mark.parametrize("command", ["show", "watch --once", "export -o out", f"score {SCORER}"])
def test_a_key_that_is_missing_or_wrong_is_named_by_its_flag(
    served: tuple[str, str], command: str, key: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = served[0].split()[1]
    ran = CliRunner().invoke(commands.app, [*command.split(), "--url", url], env={**WIDE, "TOKENGROVE_ADMIN_KEY": key})
    assert (ran.exit_code, ran.stderr) == (1, f"tokengrove: {url}: {told}\n")


def test_a_search_for_text_shows_what_it_found_and_a_database_that_was_never_indexed_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "on").mkdir()
    (tmp_path / "off").mkdir()
    with real_server(tmp_path / "on", engine_arg=("play=agent",), search=True) as url, Client(url) as client:
        with client.session("task") as session:
            _play(session.base_url, session.api_key, edited=False)
        while client.run(operations.one(operations.Call("GET", "/rl/sessions", params={"include": "counts"})))[
            "unindexed"
        ]:
            pass
        database = f"--database-url {default_url(tmp_path / 'on')}"
        for place in (f"--url {url}", database):
            assert _ids(_show("--json", "--text", '"exactly two"', *place.split())) == ["task-0"]
            shown = _show("--text", '"exactly two"', *place.split()).splitlines()
            assert re.fullmatch(r"task-0 \S+: Say exactly: two.*", shown[-1])
            assert _show("--text", "three", *place.split()) == "no session matches\n"
    with real_server(tmp_path / "off"):
        pass
    ran = CliRunner().invoke(
        commands.app, ["show", "--text", "x", "--database-url", default_url(tmp_path / "off")], env=WIDE
    )
    assert ran.exit_code != 0 and "--search" in ran.output + ran.stderr
