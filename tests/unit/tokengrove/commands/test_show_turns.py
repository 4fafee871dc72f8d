"""`tokengrove show SESSION`: one turn, its tokens and the samples of the session, from a server and its database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.support import default_url, function_tool, real_server, system, tool_result, user
from tokengrove import commands

HOSTILE = "[red]evil[/] \x1b[2J\u202e<script>alert(1)</script>\x00 end"
WIDE = {"COLUMNS": "200", "TOKENGROVE_DATABASE_URL": ""}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The flags that read a server, and those that read its database. Turn 2 went back; turn 3 called a tool."""
    folder = tmp_path_factory.mktemp("turns")
    with real_server(folder, engine_arg=("play=agent",)) as url:
        head = [system("Be kind."), user("Say exactly: the lazy dog")]
        first = _chat(url, *head)
        _chat(url, *head, first, user("Say exactly: two"))
        _chat(url, *head, first, user(HOSTILE), max_tokens=20)
        add = function_tool("add", {"a": {"type": "integer"}, "b": {"type": "integer"}})
        asked = [user("What is 1 plus 2?")]
        called = _chat(url, *asked, tools=[add], max_tokens=128)
        results = [tool_result(call["id"], "3") for call in called["tool_calls"]]
        _chat(url, *asked, called, *results, tools=[add])
        _ok(url, "/rl/set_reward", {"reward": 1.0, "turn": 4})
        _ok(url, "/rl/mark", {"turn": 1, "trainable": False})
        _ok(url, "/rl/mark", {"turn": 2, "trainable": True, "spans": [[0, 5]]})
        yield f"--url {url}", f"--database-url {default_url(folder)}"


def _ok(url: str, path: str, body: Any) -> Any:
    reply = httpx.post(f"{url}/s{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def _chat(url: str, *messages: Any, **more: Any) -> Any:
    body = {"model": "m", "max_tokens": 64, "messages": messages, **more}
    return _ok(url, "/v1/chat/completions", body)["choices"][0]["message"]


def _show(place: str, flags: str, **environment: str) -> str:
    ran = CliRunner().invoke(commands.app, ["show", "s", *flags.split(), *place.split()], env={**WIDE, **environment})
    assert ran.exit_code == 0, (ran.output, ran.stderr)
    return ran.output


@pytest.mark.parametrize(
    "flags",
    [
        *("--turn 0", "--turn 2 --whole", "--turn 3", "--turn 2 --json"),
        *("--samples", "--samples --layout tree", "--samples --layout individual", "--samples --json"),
    ],
)
def test_a_server_and_its_database_show_the_same(served: tuple[str, str], flags: str) -> None:
    assert _show(served[0], flags) == _show(served[1], flags)


def test_a_turn_has_its_figures_the_reason_in_words_and_the_diff(served: tuple[str, str]) -> None:
    shown = _show(served[0], "--turn 2")
    assert shown.startswith("turn 2 branched of session s, chatcmpl-")
    rows = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in shown.splitlines()[1:8]}
    assert rows["asked by"] == "chat API, model m, purpose aux"
    assert "of prompt" in rows["tokens"] and "20 sampled, length, weight version 0" in rows["tokens"]
    assert "first token after" in rows["time"] and "in all" in rows["time"]
    assert rows["reward"] == "reward -, return 0"
    assert rows["place"].startswith("branched: The request continues a conversation that was continued before")
    assert "nearest turn 1, message 3 (user), content: the text of the message differs" in shown
    assert "- Say exactly: two\n+ [red]evil[/]" in shown


def test_what_an_earlier_turn_said_is_a_line_each_unless_the_whole_is_asked_for(served: tuple[str, str]) -> None:
    short, whole = _show(served[0], "--turn 1"), _show(served[0], "--turn 1 --whole")
    assert "\nbefore that\nsystem Be kind.\nuser Say exactly: the lazy dog\nassistant the lazy dog\n" in short
    assert short.endswith("\nuser\nSay exactly: two\n\nassistant (sampled)\ntwo\n")
    assert "\nuser\nSay exactly: the lazy dog\n" in whole and "before that" not in whole


def test_calls_and_results_of_tools_are_shown(served: tuple[str, str]) -> None:
    assert "→ add(" in _show(served[0], "--turn 3")
    assert "\ntool call_" in _show(served[0], "--turn 4")
    assert "\ntools add\n" in _show(served[0], "--turn 3")


@pytest.mark.parametrize("flags", ["--turn 2", "--turn 2 --tokens", "--turn 2 --whole", "", "--diff"])
def test_an_agents_text_acts_on_no_terminal_and_is_no_markup(served: tuple[str, str], flags: str) -> None:
    shown = _show(served[0], flags)
    assert not {"\x1b", "\u202e", "\x00"} & set(shown)
    assert not flags or "[red]evil[/] ·[2J·<script>alert(1)</script>· end" in shown


def test_tokens_are_marked_with_why_they_are_not_trained(served: tuple[str, str]) -> None:
    shown = _show(served[0], "--turn 1 --tokens")
    assert "⟦3 mark⟧two" in shown
    assert "the lazy dog" in shown and " trained⟧the lazy dog" in shown
    assert "it was marked with `trainable: false`, or is outside the marked `spans`" in shown
    assert "layout concat, " in shown.splitlines()[-1]
    part = _show(served[0], "--turn 2 --tokens")
    assert "⟦5 trained⟧" in part and "⟦15 mark⟧" in part


def test_tokens_by_version_and_by_logprob(served: tuple[str, str]) -> None:
    assert "⟦v0⟧the lazy dog" in _show(served[0], "--turn 0 --tokens --by version")
    assert "mean -0.693, lowest -0.693" in _show(served[0], "--turn 0 --tokens --by logprob")


def test_without_a_tokenizer_tokens_are_their_ids(served: tuple[str, str]) -> None:
    server, database = (json.loads(_show(place, "--turn 0 --tokens --json")) for place in served)
    assert server["tokens"]["ids"] == database["tokens"]["ids"]
    assert server["tokens"]["states"] == database["tokens"]["states"]
    shown = _show(served[1], "--turn 0 --tokens")
    assert " ".join(map(str, server["tokens"]["ids"][:5])) in shown


def test_colours_are_only_for_terminals_that_want_them(served: tuple[str, str]) -> None:
    assert "\x1b[" in _show(served[0], "--turn 0 --tokens", FORCE_COLOR="1")
    plain = _show(served[0], "--turn 0 --tokens", FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b[32m" not in plain


def test_samples_show_what_each_trains_and_why_the_rest_is_not_trained(served: tuple[str, str]) -> None:
    shown = _show(served[0], "--samples")
    assert shown.startswith("sample 1 of 3, turns 0 → 1: ")
    assert " | 5 TRAINED | 15 sampled\n" in shown
    assert "  18 not: the token was marked with `trainable: false`, or is outside the marked `spans` (mark)\n" in shown


def test_the_json_of_samples_is_that_of_an_export(served: tuple[str, str]) -> None:
    url = served[0].split()[1]
    for layout in ("individual", "concat", "tree"):
        body = {"session_id": "s", "layout": layout, "outline": True}
        exported = httpx.post(f"{url}/trajectories/export", json=body, timeout=60).json()["samples"]
        for place in served:
            shown = _show(place, f"--samples --json --layout {layout}").splitlines()
            assert [json.loads(line) for line in shown] == exported


def test_the_json_of_a_session_is_the_answer_of_the_api(served: tuple[str, str]) -> None:
    url = served[0].split()[1]
    assert json.loads(_show(served[0], "--json")) == httpx.get(f"{url}/rl/sessions/s?include=compared").json()
