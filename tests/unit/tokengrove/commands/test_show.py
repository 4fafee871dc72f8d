"""`tokengrove show`: the tree, the causes of its forks, and both sides of what differs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support import assistant, default_url, function_tool, real_server, says, serving, system, user
from tokengrove import commands
from tokengrove.client import SessionTree, TreeNode
from tokengrove.reasons import BY_FIELD, Explained
from tokengrove.terminal.forks import print_fork
from tokengrove.terminal.text_diff import diff
from tokengrove.tree_view import session_tree

WIDE = {"COLUMNS": "200", "TOKENGROVE_DATABASE_URL": ""}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URLs of a server and of its database, with a session of an agent that rewrites its history."""
    folder = tmp_path_factory.mktemp("show")
    with real_server(folder, engine_arg=("play=agent",)) as url:
        _wander(url)
        yield url, default_url(folder)


def _wander(url: str) -> None:
    def chat(*messages: Any, **more: Any) -> Any:
        body = {"model": "m", "max_tokens": 64, "messages": messages, **more}
        reply = httpx.post(f"{url}/wander/v1/chat/completions", json=body, timeout=60)
        return reply.json()["choices"][0]["message"]

    head = [system("Be kind.\nIt is 9:00."), user("Say exactly: the lazy dog sleeps")]
    first = chat(*head)
    second = chat(*head, first, user("Say exactly: two"))
    chat(*head, assistant("the lazy cat sleeps"), user("Say exactly: two"), second, user("Say exactly: three"))
    chat(*head, first, user("Say exactly: instead"))
    later = [system("Be kind.\nIt is 9:01."), *head[1:]]
    chat(*later, first, user("Say exactly: two"), second, user("Say exactly: four"))
    chat(head[0], user("Say exactly: two"), second, user("Say exactly: five"))
    chat(*head, first, user("Say exactly: two"), tools=[function_tool("add")])
    chat(*head, first, user("Say exactly: two"), second, user("Say exactly: six"))


def _show(*arguments: str) -> str:
    ran = CliRunner().invoke(commands.app, ["show", *arguments], env=WIDE)
    assert ran.exit_code == 0, ran.output
    return ran.output


def test_a_server_and_its_database_show_the_same(served: tuple[str, str]) -> None:
    url, database = served
    assert _show("wander", "--diff", "--url", url) == _show("wander", "--diff", "--database-url", database)


def test_the_tree_names_turns_reasons_and_the_nearest_turn_of_each_fork(served: tuple[str, str]) -> None:
    lines = _show("wander", "--url", served[0]).splitlines()
    starts = [line.split(", ")[0] for line in lines if " tokens" in line]
    assert starts == [
        "├── 0 first",
        "│   ├── 1 continued",
        "│   ├── 3 branched from 0",
        "│   └── 7 continued from 1",
        "├── 2 rewritten",
        "├── 4 system_changed",
        "├── 5 new_root",
        "└── 6 tools_changed",
    ]
    after = lines[lines.index(next(line for line in lines if "2 rewritten" in line)) + 1]
    assert after.strip("│ ") == (
        "nearest turn 1, message 2 (assistant, of turn 0), content: the text of the message differs"
    )


def test_diff_prints_both_sides_of_each_fork(served: tuple[str, str]) -> None:
    forks = _show("wander", "--diff", "--url", served[0]).split("\n\n")[1:]
    shown = {fork.splitlines()[0]: fork.strip().splitlines()[2:] for fork in forks}
    assert shown == {
        "turn 2 rewritten": ["- the lazy dog sleeps", "+ the lazy cat sleeps"],
        "turn 3 branched": ["- Say exactly: two", "+ Say exactly: instead"],
        "turn 4 system_changed": ["  Be kind.", "- It is 9:00.", "+ It is 9:01."],
        "turn 5 new_root": ["- user: Say exactly: the lazy dog sleeps", "- assistant: the lazy dog sleeps"],
        "turn 6 tools_changed": ["+ tools added: add"],
    }


@pytest.mark.parametrize("flag", ["--url", "--database-url"])
def test_an_unknown_session_is_one_line_of_error(
    served: tuple[str, str], flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = served[0] if flag == "--url" else served[1]
    monkeypatch.setattr("sys.argv", ["tokengrove", "show", "nowhere", flag, place])
    with pytest.raises(SystemExit):
        commands.main()
    assert "no session 'nowhere'" in capsys.readouterr().err


def test_help_defines_every_reason() -> None:
    shown = " ".join(_show("--help").split())
    for _, kind in BY_FIELD.values():
        for word in kind:
            assert f"{word.value} {word.meaning}" in shown
    others = set(Explained.__subclasses__()) - {words for _, words in BY_FIELD.values()}
    assert {kind.__name__ for kind in others} <= {"Part"}  # a field of a query, not a reason


def test_notes_and_errors_of_a_turn_are_shown_whatever_they_are_called() -> None:
    def node(name: str, **fields: Any) -> TreeNode:
        values: dict[str, Any] = {
            **{"id": name, "parent_id": None, "aligned": False, "seq": 0, "api": "chat", "reason": "first", "turn": 0},
            **{"status": "complete", "purpose": "main", "reward": None, "return_": None, "finish_reason": "stop"},
            **{"prompt_tokens": 1, "output_tokens": 2, "versions": []},
        }
        return TreeNode(**{**values, **fields})

    nodes = (
        node("a", notes={"echo": ["split", "text_dropped"], "new": True}),
        node("b", status="failed", turn=None, parent_id="a", error="the engine [died]\x1b[2J"),
        node("c", turn=1, parent_id="a", reason="continued", aligned=True, purpose="title"),
    )
    tree = session_tree(SessionTree("s", "active", None, None, None, nodes))
    labels = [str(tree.children[0].label), *(str(child.label) for child in tree.children[0].children)]
    assert "(echo: split, text_dropped; new: true)" in labels[0]
    assert labels[1] == r"[red]failed[/], 1+2 tokens: the engine \[died]·[2J"
    assert "1 [bold]continued[/], title, aligned" in labels[2]


def test_a_diff_shows_changed_lines_with_one_line_around_them() -> None:
    old = "\n".join(f"line {number}" for number in range(20))
    new = old.replace("line 9\n", "line nine\n").replace("line 17\n", "")
    assert [line.plain for line in diff(old, new)] == [
        *("  line 8", "- line 9", "+ line nine", "  line 10"),
        "  ...",
        *("  line 16", "- line 17", "  line 18"),
    ]


def test_a_diff_marks_the_words_that_changed_and_shortens_what_is_equal() -> None:
    removed, added = diff("x" * 500 + " old end", "x" * 500 + " new end")
    assert [added.plain[span.start : span.end] for span in added.spans if "reverse" in str(span.style)] == ["new"]
    assert len(removed.plain) < 160 and removed.plain.endswith("old end")


def test_a_diff_shows_carriage_returns_and_no_control_characters() -> None:
    lines = [line.plain for line in diff("a\r\nb\x1b[2J", "a\nb\x1b[2J")]
    assert lines == ["- a␍", "+ a", "  b·[2J"]


def test_a_diff_of_very_long_texts_is_by_lines() -> None:
    words = "word " * 20_000
    assert [line.plain[:6] for line in diff(words, words + "more")] == ["- word", "+ word"]


def test_the_database_url_and_a_server_exclude_each_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = ["--url", "http://localhost:1", "--database-url", f"sqlite:///{tmp_path / 'a.db'}"]
    monkeypatch.setattr("sys.argv", ["tokengrove", "show", "s", *flags])
    with pytest.raises(SystemExit):
        commands.main()
    assert "not both" in capsys.readouterr().err


PART = {"digest": "3f2a91c0" * 8, "at": 2, "width": 1280, "height": 800, "detail": "low"}
NOTE = "[image 1280x800 3f2a91c0 low]"


@pytest.mark.parametrize(
    ("why", "value", "lines"),
    [
        ("tool_call_id", "call_2", ["- tool_call_id: call_1", "+ tool_call_id: call_2"]),
        ("images", [PART], ["- 3 4", f"+ 3 {NOTE}4"]),
    ],
)
def test_what_identifies_a_message_beside_its_text_is_printed(
    why: str, value: Any, lines: list[str], capsys: Any
) -> None:
    place = {"interaction_id": "a", "turn": 0}
    message = {"index": 1, "role": "tool", "why": why, "count": 1, "of": place}
    compared = {
        "nearest": place,
        "why": why,
        "message": message,
        "tools": None,
        "template_options": None,
        "token": None,
    }
    result = {"role": "tool", "content": "3 4", "tool_call_id": "call_1"}
    sides = {
        "a": {"messages": [user("hi"), result], "output": {"role": "assistant", "content": "x"}},
        "b": {"messages": [user("hi"), {**result, why: value}]},
    }
    node = TreeNode("b", None, False, 1, "chat", "branched", "complete", None, None, None, "stop", 1, 1, [], turn=1)
    print_fork(lambda name, *_: sides[name], node, compared, Console())
    assert capsys.readouterr().out.splitlines()[-2:] == lines


async def test_a_database_of_either_kind_is_read_without_a_server(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("an answer", "more"), database_url=database_url) as server:
        first = await server.answer([user("one")])
        await server.answer([user("one"), assistant("edited"), user("two")])
        await server.ok("/s/rl/end_session", {"outcome": "Finished"})
    shown = _show("s", "--diff", "--database-url", database_url)
    assert shown.startswith("session s ended, Finished\n")
    assert shown.splitlines()[-2:] == [f"- {first['content']}", "+ edited"]


def test_tokens_and_options_that_differ_are_printed_of_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    token = {"index": 7, "sent": [1], "recorded": [2, 3], "sent_text": "a\n", "recorded_text": None}
    options = {"sent": {"thinking": False}, "recorded": {}}
    compared = {"nearest": {"interaction_id": "a", "turn": 0}, "why": "tokens", "message": None, "tools": None}
    node = TreeNode("b", None, False, 1, "chat", "template", "complete", None, None, None, "stop", 1, 1, [], turn=1)
    print_fork(lambda *_: {}, node, {**compared, "token": token, "template_options": options}, Console(width=100))
    assert capsys.readouterr().out.splitlines()[3:] == [
        *("- template options: {}", "- from token 7 on: [2, 3]"),
        *('+ template options: {"thinking": false}', '+ from token 7 on: [1] "a\\n"'),
    ]
