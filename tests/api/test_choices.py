"""The choices of one request are turns in order of index, once all have ended, whichever was sampled first."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import proxy.turns.turns
from proxy.store import writer
from tests.databases import execute
from tests.mailboxes import MailServer, posting
from tests.support import default_url, says, serving, system, until, user


async def asked(server: MailServer, text: str, n: int, waiting: int) -> tuple[asyncio.Task[Any], list[Any]]:
    """Ask for `n` choices; return the agent and the letters of the choices by index, with `waiting` in the mailbox."""
    agent = server.ask(text, n=n)
    await until(lambda: server.mailbox.waiting == waiting)
    return agent, [await server.poll() for _ in range(n)]


async def turns(server: MailServer, *names: str) -> list[Any]:
    """The given fields of the complete turns, by their number."""
    nodes = sorted((node for node in await server.tree() if node["turn"] is not None), key=lambda node: node["turn"])
    return [tuple(node[name] for name in names) for node in nodes]


async def sampled(server: MailServer, letter: Any, text: str) -> None:
    """Answer a choice, and wait until it has been sampled whole."""
    await server.deliver(letter, text=text)
    running = server.app.state.turns.running._turns
    own = letter["request_id"]
    await until(lambda: all(turn.interaction.id != own or turn.interaction.finish_reason for turn in running))


async def failed(server: MailServer, n: int) -> tuple[asyncio.Task[Any], list[Any]]:
    """Ask for choices whose reply will not come; return the agent, whose result is the response, and the letters."""
    body = {"model": "m", "messages": [user("several")], "n": n}
    agent = asyncio.create_task(server.post("/s/v1/chat/completions", body))
    await until(lambda: server.mailbox.waiting == n)
    return agent, [await server.poll() for _ in range(n)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_choices_are_numbered_by_index_whichever_ends_first(tmp_path: Path, order: tuple[int, ...]) -> None:
    async with posting(tmp_path) as server:
        agent, letters = await asked(server, "several", 3, 3)
        for index in order:
            await sampled(server, letters[index], f"answer {index}")
        reply = await agent
        ids = [letter["request_id"] for letter in letters]
        assert [choice["message"]["content"] for choice in reply["choices"]] == ["answer 0", "answer 1", "answer 2"]
        assert await turns(server, "id", "seq") == [(ids[0], 0), (ids[1], 1), (ids[2], 2)]
        await server.ok("/s/rl/set_reward", {"step_scores": [1, -1, 0.5]})
        await server.ok("/s/rl/set_reward", {"turn": 1, "reward": 2, "name": "style"})
        assert await turns(server, "id", "reward", "rewards") == [
            (ids[0], 1.0, {}),
            (ids[1], -1.0, {"style": 2.0}),
            (ids[2], 0.5, {}),
        ]
        for layout in ("individual", "concat"):
            assert [sample["interaction_id"] for sample in await server.export(layout=layout)] == ids


async def test_requests_stay_in_order_of_completion_and_choices_count_together(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        several, letters = await asked(server, "several", 2, 2)
        await sampled(server, letters[1], "answer 1")
        single = server.ask("single")
        await until(lambda: server.mailbox.waiting == 2)
        letter = await server.poll()
        await server.deliver(letter, text="alone")
        await single
        assert await turns(server, "id") == [(letter["request_id"],)]  # choice 1 has ended, choice 0 has not
        assert await server.ok("/s/rl/set_reward", {"turn": 0, "reward": 1}) == {
            "interaction_ids": [letter["request_id"]]
        }
        missing = await server.post("/s/rl/set_reward", {"turn": 1, "reward": 1})
        assert missing.status_code == 404
        await server.deliver(letters[0], text="answer 0")
        await several
        ids = [letter["request_id"], letters[0]["request_id"], letters[1]["request_id"]]
        assert await turns(server, "id", "reward") == [(ids[0], 1.0), (ids[1], None), (ids[2], None)]


async def test_the_example_in_the_concepts_holds(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        several, (a0, a1) = await asked(server, "several", 2, 2)
        await sampled(server, a1, "A.1")
        assert await turns(server, "id") == []
        single = server.ask("single")
        await until(lambda: server.mailbox.waiting == 2)
        b = await server.poll()
        await server.deliver(b, text="B")
        await single
        assert await turns(server, "id") == [(b["request_id"],)]
        await server.deliver(a0, text="A.0")
        await several
        title = asyncio.create_task(server.chat([system("You are a title generator."), user("name this")]))
        t = await server.letter()
        await server.deliver(t, text="T")
        await title
        ids = [letter["request_id"] for letter in (b, a0, a1, t)]
        await server.ok("/s/rl/set_reward", {"step_scores": [0, 1, -1], "align": "first"})
        assert await turns(server, "id", "reward") == list(zip(ids, (0.0, 1.0, -1.0, None), strict=True))
        assert await server.ok("/s/rl/set_reward", {"reward": 1}) == {"interaction_ids": [a1["request_id"]]}


@pytest.mark.parametrize("failing", [0, 1])
async def test_a_choice_counts_after_its_sibling_has_failed(tmp_path: Path, failing: int) -> None:
    async with posting(tmp_path) as server:
        agent, letters = await failed(server, 2)
        good = 1 - failing
        await sampled(server, letters[good], "good")
        assert await turns(server, "id") == []
        await server.deliver(letters[failing], error="no")
        assert (await agent).status_code == 502
        assert await turns(server, "id") == [(letters[good]["request_id"],)]


async def test_a_choice_that_was_sampled_is_kept_when_the_client_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy.turns.turns, "GRACE_S", 0.01)
    async with posting(tmp_path) as server:
        agent, letters = await failed(server, 2)
        await sampled(server, letters[1], "sampled")
        agent.cancel()
        await until(lambda: not server.app.state.turns.running._turns)
        assert sorted((node["id"], node["status"]) for node in await server.tree()) == [
            (letters[0]["request_id"], "aborted"),
            (letters[1]["request_id"], "complete"),
        ]


async def test_a_shutdown_keeps_the_choice_that_was_sampled(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        agent, letters = await failed(server, 2)
        await sampled(server, letters[0], "sampled")
        await server.app.state.turns.drain(0.0)
        assert (await agent).status_code == 503
        assert await turns(server, "id", "status") == [(letters[0]["request_id"], "complete")]


async def test_a_reply_is_noted_as_written_when_its_last_choice_ends_just_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_RESOLVED_AT_ONCE", 1)  # each choice ends in a pass of the event loop of its own
    url = default_url(tmp_path)
    async with serving(tmp_path, says(*"abcdefgh"), database_url=url) as server:
        await server.chat([user("several")], n=8)
    assert execute(url, "SELECT * FROM unreplied") == []
