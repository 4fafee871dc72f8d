"""Sessions are scored while they go on: nothing is scored twice, and nothing is missed by a stop of either side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.api import event_feed
from tests.support import Server, free_port, real_server, says, serving, until, user
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.rollout.scorers import Turn, live, score_live, score_sessions, turn_scorer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "_TICK_S", 0.02)
    monkeypatch.setattr(event_feed, "_SETTLE_S", 0.01)
    monkeypatch.setattr(live, "_CONNECT_AGAIN_S", 0.01)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Server]:
    async with serving(tmp_path, says(*["oak"] * 40)) as server:
        yield server


def client_of(server: Server, admin_key: str | None = None) -> AsyncClient:
    return AsyncClient(app=server.app, admin_key=admin_key)


class Chat:
    """A user's chat with the policy, in one session."""

    def __init__(self, server: Server, session: str) -> None:
        self.server, self.session, self.messages = server, session, list[Any]()

    async def say(self, text: str) -> str:
        """Send a message with the history; return the id of the reply."""
        self.messages.append(user(text))
        reply = await self.server.chat(self.messages, self.session)
        self.messages.append(reply["choices"][0]["message"])
        return str(reply["id"])


class Judge:
    """A scorer that reads the next message of the user. `asked`: its calls, as (reply id, next text)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.broken = 0

    @property
    def scorer(self) -> Any:
        @turn_scorer(name="thanked")
        async def thanked(interaction_id: str, next_messages: Sequence[Mapping[str, Any]]) -> float | None:
            text = "".join(each["content"] for each in next_messages)
            self.asked.append((interaction_id, text))
            if self.broken:
                self.broken -= 1
                raise LookupError("the judge is away")
            return None if text == "hm" else float("thanks" in text)

        return thanked


async def rewards(server: Server, session: str) -> list[dict[str, float]]:
    return [each["rewards"] for each in await server.tree(session)]


async def test_a_turn_is_scored_by_the_next_message_of_its_user_while_the_session_runs(served: Server) -> None:
    judge, chat = Judge(), Chat(served, "a")
    async with client_of(served) as client, aclosing(score_live(client, [judge.scorer])) as scores:
        first = await chat.say("Name a tree")
        second = await chat.say("thanks, another")
        scored = await anext(scores)
        assert (scored.session_id, scored.scores, scored.failures) == ("a", {"thanked": 1.0}, [])
        await chat.say("that is the same")
        assert (await anext(scores)).scores == {"thanked": 0.0}
    assert judge.asked == [(first, "thanks, another"), (second, "that is the same")]
    assert await rewards(served, "a") == [{"thanked": 1.0}, {"thanked": 0.0}, {}]


async def test_the_results_of_tools_are_next_messages_and_a_fork_leaves_the_first_ones(served: Server) -> None:
    found: list[Turn] = []

    def seen(turn: Turn) -> None:
        found.append(turn)

    chat = Chat(served, "a")
    await chat.say("Name a tree")
    shared = list(chat.messages)
    await chat.say("And now?")
    await served.chat([*shared, user("Or rather"), user("two things")], "a")
    async with client_of(served) as client:
        await score_sessions(client, {}, [turn_scorer(seen)])
        shown = [(await client.show_turn("a", at, ["messages"]))["messages"] for at in range(3)]
    assert [each.next_messages for each in found] == [[shown[1][-1]], (), ()]
    assert [each.messages for each in found] == shown


async def test_a_call_without_a_score_is_not_repeated_and_one_that_failed_is(served: Server) -> None:
    judge, chat = Judge(), Chat(served, "a")
    judge.broken = 2
    pauses: list[int] = []

    def pause(failures: int) -> float:
        pauses.append(failures)
        return 0.0

    async with client_of(served) as client, aclosing(score_live(client, [judge.scorer], pause_s=pause)) as scores:
        first = await chat.say("Name a tree")
        second = await chat.say("thanks")
        assert [str(each) for each in (await anext(scores)).failures] == [
            f"scorer thanked of {first}: LookupError: the judge is away"
        ]
        assert len((await anext(scores)).failures) == 1
        assert (await anext(scores)).scores == {"thanked": 1.0}
        third = await chat.say("hm")
        await chat.say("thanks")
        assert (await anext(scores)).scores == {"thanked": 1.0}
        assert pauses == [1, 2]
    assert [name for name, _ in judge.asked] == [first, first, first, second, third]


async def test_what_happened_while_nobody_scored_is_scored_at_the_start_and_once(served: Server) -> None:
    judge, chat, ended = Judge(), Chat(served, "a"), Chat(served, "b")
    for each in (chat, ended):
        await each.say("Name a tree")
        await each.say("thanks")
    await served.ok("/b/rl/end_session", {})
    for _ in range(2):
        async with client_of(served) as client, aclosing(score_live(client, [judge.scorer])) as scores:
            if not judge.asked:
                assert {(await anext(scores)).session_id, (await anext(scores)).session_id} == {"a", "b"}
            else:
                await chat.say("thanks again")
                assert (await anext(scores)).session_id == "a"
    assert len(judge.asked) == 3


async def test_a_trajectory_is_scored_when_its_session_has_ended(served: Server) -> None:
    calls: list[int] = []

    def turns_of(trajectory: Any) -> float:
        calls.append(len(trajectory.turns))
        return 0.5

    chat = Chat(served, "a")
    async with client_of(served) as client, aclosing(score_live(client, [turns_of, Judge().scorer])) as scores:
        await chat.say("Name a tree")
        await chat.say("thanks")
        assert (await anext(scores)).scores == {"thanked": 1.0}
        await served.ok("/a/rl/end_session", {})
        assert (await anext(scores)).scores == {"turns_of": 0.5}
    assert calls == [2]


async def test_a_session_that_is_deleted_while_its_judge_fails_is_left(served: Server) -> None:
    judge, chat = Judge(), Chat(served, "gone")
    judge.broken = 1_000_000
    await chat.say("Name a tree")
    await chat.say("thanks")
    begun = asyncio.all_tasks()

    def left() -> bool:
        names = {each.get_coro().__qualname__ for each in asyncio.all_tasks() - begun}  # type: ignore[union-attr]
        return "_Live._follow" not in names

    scores = score_live(client := client_of(served), [judge.scorer], pause_s=lambda failures: 0.001)
    async with client, aclosing(scores):
        assert (await anext(scores)).failures
        assert not left()
        await served.http.delete("/rl/sessions/gone")
        await until(left)


async def test_a_server_that_is_started_again_is_followed_again(tmp_path: Path) -> None:
    judge, port = Judge(), free_port()
    said: list[Any] = []

    async def say(url: str, text: str) -> None:
        said.append(user(text))
        async with httpx.AsyncClient(base_url=url) as http:
            reply = await http.post("/a/v1/chat/completions", json={"model": "m", "max_tokens": 4, "messages": said})
        said.append(reply.raise_for_status().json()["choices"][0]["message"])

    async with AsyncClient(f"http://127.0.0.1:{port}") as client, AsyncExitStack() as stack:
        with real_server(tmp_path, port=port) as url:
            scores = await stack.enter_async_context(aclosing(score_live(client, [judge.scorer])))
            await say(url, "Name a tree")
            await say(url, "thanks")
            assert (await anext(scores)).scores == {"thanked": 1.0}
            coming = asyncio.ensure_future(anext(scores))
        with real_server(tmp_path, port=port) as url:
            await say(url, "a third")
            assert (await coming).scores == {"thanked": 0.0}
    assert len(judge.asked) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"concurrency": 0}, InvalidRequest, "'concurrency' must be at least 1"),
        ({"filter": {"groups": "x"}}, ProxyError, "groups"),
    ],
)
async def test_what_cannot_be_followed_is_an_error_at_once(
    served: Server, arguments: Any, error: type[Exception], told: str
) -> None:
    async with client_of(served) as client:
        with pytest.raises(error, match=told):
            await anext(score_live(client, [Judge().scorer], **arguments))


async def test_a_wrong_key_is_an_error_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, says("oak"), admin_key="a" * 16) as server, client_of(server, "b" * 16) as client:
        with pytest.raises(ProxyError, match="key"):
            await anext(score_live(client, [Judge().scorer]))
