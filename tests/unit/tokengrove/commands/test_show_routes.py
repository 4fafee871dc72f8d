"""`tokengrove show` of a session with turns of several routes, read from a database."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.routed import record
from tests.support import default_url
from tokengrove import commands


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = default_url(tmp_path)
    asyncio.run(record(url, "s", "policy", "opponent", "judge"))
    return url


def show(database: str, *arguments: str, code: int = 0) -> str:
    environment = {"COLUMNS": "200", "TOKENGROVE_DATABASE_URL": database}
    ran = CliRunner().invoke(commands.app, ["show", *arguments], env=environment)
    assert ran.exit_code == code, ran.output
    return ran.output


def test_the_tree_and_a_turn_name_routes(database: str) -> None:
    lines = show(database, "s").splitlines()
    assert [route for line in lines[1:] for route in ("policy", "opponent", "judge") if route in line] == [
        "policy",
        "opponent",
        "judge",
    ]
    assert "route opponent (frozen)" in show(database, "s", "--turn", "1")


def test_samples_are_of_the_named_routes(database: str) -> None:
    assert "the token was sampled by a route that is never trained" in show(database, "s", "--samples")
    for chosen, routes in (([], ["policy"]), (["--route", "opponent", "--route", "policy"], ["policy", "opponent"])):
        lines = show(database, "s", "--samples", "--json", *chosen).splitlines()
        assert [json.loads(line)["route"] for line in lines] == routes


def test_the_tokens_of_a_turn_are_those_of_an_export_of_the_named_route(database: str) -> None:
    shown = json.loads(show(database, "s", "--turn", "0", "--tokens", "--json", "--route", "opponent"))
    assert shown["tokens"]["export"]["untrained_tokens"] == {"frozen": 2, "route": 2}


@pytest.mark.parametrize("route", ["judge", "nobody"])
def test_a_route_without_tokens_is_refused(database: str, route: str) -> None:
    assert route in show(database, "s", "--samples", "--route", route, code=1)
