"""The audit finds each invariant that SQL breaks in a stored session, and nothing in an intact database."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.commands.audit import Audit, Finding, audit, check_session
from proxy.engine.interface import PauseMode
from proxy.store.inspection import Stored, inspecting
from proxy.store.session_changes import SessionChanges
from proxy.store.turn_log import TurnLog
from proxy.types import Interaction, SessionRecord
from tests.databases import execute
from tests.interactions import interaction
from tests.support import assistant, says, serving, until, user
from tests.wide import CROSSED
from tokengrove.errors import ConfigurationError
from tokengrove.options.session import Credit, SessionStatus
from tokengrove.reasons import Reason


def checked(url: str, session_id: str | None = None) -> Audit:
    with inspecting(url) as inspection:
        return audit(inspection, session_id)


async def grow(folder: Path, url: str) -> None:
    """Create session s (a root with two children, ended with a reward) and session t (live, one turn)."""
    async with serving(folder, says("one", "two", "three", "four"), database_url=url) as server:
        first = [user("a")]
        answered = [*first, assistant(await text(server, first))]
        for words in ("b", "c"):
            await server.chat([*answered, user(words)])
        await server.ok("/s/rl/end_session", {"reward": 1.0})
        await server.chat([user("x")], session="t")


async def text(server: object, messages: list[object]) -> str:
    return (await server.answer(messages))["content"]  # type: ignore[attr-defined,no-any-return]


async def test_a_whole_database_has_no_findings(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    result = checked(database_url)
    assert result.findings == []
    assert (result.sessions, result.interactions, result.begun_not_ended) == (2, 4, 0)
    assert result.output_tokens > 4


async def test_an_audit_tells_how_far_it_is(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    await grow(tmp_path, url)
    told: list[tuple[int, int]] = []
    with inspecting(url) as inspection:
        audit(inspection, progress=lambda *done: told.append(done))
    assert told == [(1, 3), (2, 4)]


async def test_what_is_marked_as_not_to_be_trained_is_no_finding(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    async with serving(tmp_path, says("one", "two"), database_url=url) as server:
        for number, mark in enumerate(({"trainable": False}, {"trainable": True, "spans": [[0, 1], [0, 2]]})):
            reply = await server.chat([user(str(number))])
            await server.ok("/s/rl/mark", {"interaction_id": reply["id"], **mark})
    assert checked(url).findings == []


@CROSSED
@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("DELETE FROM returns WHERE value = 1.0", "stored return is None"),
        ("UPDATE returns SET value = 0.25 WHERE value = 1.0", "stored return is 0.25"),
        ("UPDATE interactions SET reward = 3.0 WHERE reward = 1.0", "its rewards give 3.0"),
        ("UPDATE interactions SET seq = 7 WHERE session_id = 's' AND seq = 2", "the seqs are [0, 1, 7]"),
        ("UPDATE sessions SET next_seq = 9 WHERE session_id = 's'", "next_seq is 9"),
        ("UPDATE interactions SET parent_id = 'gone' WHERE reason = 'branched'", "not an earlier complete interaction"),
        ("UPDATE interactions SET parent_id = id WHERE reason = 'continued'", "not an earlier complete interaction"),
        ("UPDATE interactions SET prefix_length = prefix_length - 1 WHERE reason = 'continued'", "its prefix has"),
        ("UPDATE interactions SET aligned = (1 = 1) WHERE reason = 'first' AND session_id = 's'", "but has none"),
        (
            "UPDATE interactions SET reason = 'continued' WHERE reason = 'branched'",
            "2 interactions have the reason",
        ),
        (
            "UPDATE interactions SET reason = 'new_root' WHERE session_id = 't'",
            "0 interactions have the reason",
        ),
        ("UPDATE interactions SET reason = 'nonsense' WHERE session_id = 't'", "its reason 'nonsense' is unknown"),
        ("UPDATE interactions SET status = 'nonsense' WHERE session_id = 't'", "cannot be decoded"),
        ("UPDATE sessions SET credit = 'nonsense' WHERE session_id = 't'", "cannot be decoded"),
        ("UPDATE sessions SET ended_at = NULL WHERE session_id = 's'", "with ended_at None"),
        ("UPDATE sessions SET ended_order = 1 WHERE session_id = 't'", "sessions share ended_order 1"),
        ("UPDATE sessions SET status = 'expired' WHERE session_id = 't'", "it is expired, with ended_at None"),
        (
            "INSERT INTO intents (interaction_id, session_id, begun_at) SELECT id, session_id, 1.0 FROM interactions",
            "still noted as begun",
        ),
        (
            "INSERT INTO intents (interaction_id, session_id, begun_at) VALUES ('i', 'nobody', 1.0)",
            "the begun call i belongs to no session",
        ),
        ("INSERT INTO unreplied VALUES ('i', 's')", "the unreplied turn i does not exist"),
    ],
)
async def test_a_broken_invariant_is_found(tmp_path: Path, database_url: str, statement: str, finding: str) -> None:
    await grow(tmp_path, database_url)
    execute(database_url, statement)
    assert any(finding in str(found) for found in checked(database_url).findings), checked(database_url).findings


async def test_damaged_tokens_are_found(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    execute(database_url, "UPDATE interactions SET logprobs = substr(logprobs, 1, 4) WHERE session_id = 's'")
    found = [str(each) for each in checked(database_url).findings]
    assert any("1 logprobs" in each or "cannot be decoded" in each for each in found)
    assert checked(database_url, "t").findings == []


async def test_calls_that_began_and_never_ended_are_counted_and_no_fault(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    execute(database_url, "INSERT INTO intents (interaction_id, session_id, begun_at) VALUES ('i', 't', 1.0)")
    result = checked(database_url)
    assert (result.findings, result.begun_not_ended) == ([], 1)


async def test_an_unknown_session_and_a_missing_database_are_named(tmp_path: Path, unmigrated_url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no database|at revision none"):
        checked(unmigrated_url)
    await grow(tmp_path, unmigrated_url)
    with pytest.raises(ConfigurationError, match="no session 'nobody'"):
        checked(unmigrated_url, "nobody")


def faults(*nodes: Interaction, ended_order: int | None = None, record: SessionRecord | None = None) -> list[str]:
    """The findings in a live session of these interactions, or in one with another `record`."""
    session = record or SessionRecord("s")
    empty: frozenset[str] = frozenset()
    return [
        found.what for found in check_session(Stored("s", session, len(nodes), ended_order, [*nodes], {}, empty, empty))
    ]


def test_a_logprob_above_0_is_found_and_rounding_is_not() -> None:
    node = interaction("a")
    node.logprobs = array("f", [5e-5])
    assert faults(node) == []
    node.logprobs = array("f", [0.5])
    assert faults(node) == ["a logprob is not finite or above 0"]


def test_a_first_turn_with_a_parent_is_found() -> None:
    nodes = [interaction("a", seq=0), interaction("b", parent="a", prefix=2, seq=1)]
    assert faults(*nodes) == []
    nodes[0].reason, nodes[1].reason = Reason.NEW_ROOT, Reason.FIRST
    assert faults(*nodes) == ["1 interactions have the reason 'first'; it must be one root"]


def test_a_continued_turn_without_a_parent_is_found() -> None:
    nodes = [interaction("a", seq=0), interaction("b", seq=1)]
    nodes[1].reason = Reason.CONTINUED
    assert faults(*nodes) == ["1 interactions have the reason 'continued' under this parent; it may be one"]


def test_an_ended_session_needs_a_place_in_the_order_of_ends() -> None:
    record = SessionRecord("s", status=SessionStatus.ENDED, ended_at=1.0)
    assert faults(record=record, ended_order=1) == []
    assert faults(record=record) == ["it is ended, with ended_at 1.0 and ended_order None"]


def test_a_parent_that_comes_after_its_child_is_found() -> None:
    nodes = [interaction("b", parent="a", seq=0), interaction("a", seq=1)]
    assert "its parent a is not an earlier complete interaction of the session" in faults(*nodes)


@pytest.fixture
def after_each_commit(database_url: str, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """What a server that is killed after one of its commits leaves: the findings after each turn, reward and end."""
    found: list[Finding] = []
    for part, name in ((TurnLog, "append"), (SessionChanges, "set_rewards"), (SessionChanges, "end_session")):
        monkeypatch.setattr(part, name, checking(getattr(part, name), database_url, found))
    return found


def checking(commit: Callable[..., Any], url: str, found: list[Finding]) -> Callable[..., Any]:
    async def committed(*given: Any, **named: Any) -> Any:
        done = await commit(*given, **named)
        found.extend(checked(url).findings)  # on the event loop, so no later commit can begin before it
        return done

    return committed


@pytest.mark.parametrize("path", ["rl/set_reward", "rl/mark"])
async def test_a_crash_after_a_late_reward_leaves_no_old_return(
    tmp_path: Path, database_url: str, after_each_commit: list[Finding], path: str
) -> None:
    async with serving(tmp_path, says("one", "two"), database_url=database_url) as server:
        first = await server.chat([user("a")])
        await server.chat([user("a"), first["choices"][0]["message"], user("b")])
        await server.ok("/s/rl/end_session", {"reward": 1.0})
        body = {"reward": 0.5} if path == "rl/set_reward" else {"trainable": False}
        await server.ok(f"/s/{path}", {"interaction_id": first["id"], **body})
        shown = [node["return"] for node in await server.tree()]
    assert shown == ([1.5, 1.0] if path == "rl/set_reward" else [1.0, 1.0])
    assert after_each_commit == []


@pytest.mark.parametrize("credit", [*Credit])
async def test_a_crash_after_a_late_turn_leaves_no_old_return(
    tmp_path: Path, database_url: str, after_each_commit: list[Finding], credit: Credit
) -> None:
    async with serving(tmp_path, says("one", "two", "three"), database_url=database_url) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "credit": credit, "discount": 0.5})
        messages = [user("a"), await server.answer([user("a")])]
        await server.engine.pause(PauseMode.IN_PLACE)
        late = [asyncio.ensure_future(server.chat([*messages, user(words)])) for words in ("b", "c")]
        await until(lambda: len(server.engine.running) == 2)
        await server.ok("/s/rl/end_session", {"reward": 1.0})
        await server.engine.resume()
        await asyncio.gather(*late)
        assert [node["return"] for node in await server.tree()] == [1.0, 0.0, 0.0]
    assert after_each_commit == []
