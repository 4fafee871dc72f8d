"""Sessions of every kind, each by a function: what agents, harnesses and environments of real runs leave behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from unittest import mock

import numpy as np

from proxy.engine.scripted.scripts import Fault, Reply
from proxy.types import ids_of
from tests.browser import hostile
from tests.browser.feed import Feed
from tests.support import assistant, call_text, function_tool, sampled, system, tool_result, until, user
from tokengrove.client import AsyncClient

TOOLS = [function_tool("run", {"command": {"type": "string"}}), function_tool("search", {"query": {"type": "string"}})]
AGENT = system("You are an agent that mends programs. Work in small steps.")
FORKED, LONG_PATH, HOSTILE, LONG_LINES, LIVE = (
    "forks/every-reason",
    "long/60k",
    "hostile/texts",
    "hostile/long-lines",
    "live/waiting",
)
"""Ids of sessions that tests open by name."""
TOLD = "sum-1-0"
"""The id of a session that trainers told about."""
LONG_TOKENS = 60_000
"""The path of the last turn of `LONG_PATH` has more tokens than this."""


async def chain(feed: Feed, session: str = "chain/plain", turns: int = 6, **start: Any) -> None:
    """One path: reasoning, tool calls and their results, and a last answer."""
    await feed.start(session, **start)
    history = [AGENT, user("The test `test_parse` fails. Find out why and mend it.")]
    for number in range(turns - 1):
        call = call_text("run", f'{{"command": "pytest -k parse --step {number}"}}')
        said = f"<think>\nStep {number}: look at what fails first.\n</think>\n\nI run the tests.\n{call}"
        answer = await feed.turn(session, history, said, tools=TOOLS)
        result = f"FAILED test_parse.py::test_{number} - AssertionError: expected {number}, got {number + 1}"
        history += [answer, tool_result(answer["tool_calls"][0]["id"], result)]
    await feed.turn(
        session, history, "<think>\nAll pass.\n</think>\n\nDone: the parser skipped the last line.", tools=TOOLS
    )
    await feed.call(session, "set_reward", reward=1.0)


async def forks(feed: Feed, session: str = FORKED) -> None:
    """A fork of every reason but `template`, which another server makes, and `drift`, which would be a bug."""
    await feed.start(session, group_id="forks", discount=0.9)
    ask = [AGENT, user("Write a poem about trees.")]
    first = await feed.turn(session, ask, "Shall it rhyme?", tools=TOOLS)  # first
    again = [*ask, first, user("Yes.")]
    second = await feed.turn(session, again, "Trees stand tall, one and all.", tools=TOOLS)  # continued
    await feed.turn(
        session, [*again, second, user("Longer, please.")], "They never fall, they give us shade.", tools=TOOLS
    )
    await feed.turn(session, again, "In the grove the tokens grow.", "Oak and ash.", n=2, tools=TOOLS)  # resampled
    await feed.turn(session, [*ask, first, user("No.")], "Then a free verse about an oak.", tools=TOOLS)  # branched
    edited = [*ask, assistant("Shall it rhyme, or not?"), user("Yes.")]
    await feed.turn(session, edited, "Edited histories make forks.", tools=TOOLS)  # rewritten
    more = [*TOOLS, function_tool("fetch", {"url": {"type": "string"}})]
    await feed.turn(session, again, "Now I could fetch a poem.", tools=more)  # tools_changed
    dated = [system("You are an agent that mends programs. Today is Tuesday."), *again[1:]]
    await feed.turn(session, dated, "On Tuesday trees are green.", tools=TOOLS)  # system_changed
    quick = {"chat_template_kwargs": {"enable_thinking": False}}
    await feed.turn(session, again, "Without a thought.", tools=TOOLS, **quick)  # options_changed
    await feed.turn(session, [user("Give this conversation a title.")], "A poem about trees")  # new_root
    await feed.call(session, "set_reward", turn=2, reward=1.0)
    await feed.call(session, "set_reward", turn=4, reward=0.25)
    await feed.call(session, "end_session", outcome="Finished", exit_reason="the poem was judged")


async def forgetting(feed: Feed, session: str = "forks/template") -> None:
    """Turns whose prompts a template renders anew: for a server with `thinking_retention` `template`."""
    await feed.start(session, group_id="forks")
    history: list[Any] = [AGENT]
    for number in range(4):
        history.append(user(f"Question {number}?"))
        history.append(await feed.turn(session, history, f"<think>\nhm {number}\n</think>\n\nAnswer {number}."))


async def failures(feed: Feed, session: str = "failures/all") -> None:
    """Turns that failed, were aborted, and were replaced by a retry; a history with an echo that lacks its text."""
    await feed.start(session, task_id="failures")
    ask = [AGENT, user("Say something long.")]
    first = await feed.turn(session, ask, "Something long.")
    more = [*ask, first, user("Longer.")]
    failing = Reply(sampled("This answer breaks off in the middle of"), chunk=2, fault=Fault.ERROR, fault_after=6)
    await feed.attempt(session, more, failing)
    await feed.turn(session, more, "The second attempt works.", headers={"x-stainless-retry-count": "1"})
    await feed.attempt(session, [*more[:-1], user("Fail for good.")], failing)
    await _left(feed, session, [*more[:-1], user("The client leaves.")])
    await feed.turn(session, [*more[:-1], user("Too long.")], Reply(sampled("cut by its limit"), chunk=4), max_tokens=3)
    await feed.call(session, "end_session", outcome="Failed", exit_reason="the environment broke", finished=False)


async def _left(feed: Feed, session: str, messages: list[Any]) -> None:
    """A turn whose client goes away: aborted once nobody came back."""
    hanging = Reply(sampled("I was saying"), chunk=1, fault=Fault.HANG, fault_after=2)
    client = asyncio.create_task(feed.attempt(session, messages, hanging))
    await until(lambda: bool(feed.server.engine.running))
    with mock.patch("proxy.turns.turns.GRACE_S", 0.01):
        client.cancel()
        await until(lambda: not feed.server.app.state.turns.running.busy)


async def several_agents(feed: Feed, session: str = "agents/planner-coder") -> None:
    """A planner, a coder, a title and a summary, with rewards of their own by name and by token."""
    await feed.start(session, group_id="agents", credit="linear", metadata={"project": "grove", "step": 3})
    plan = [system("You plan."), user("Add a cache.")]
    planned = await feed.turn(session, plan, "1. Read. 2. Write.", agent="planner", tools=TOOLS)
    sub = {"x-tokengrove-purpose": "subagent"}
    code = [system("You write code."), user("1. Read.")]
    written = await feed.turn(
        session, code, call_text("search", '{"query": "cache"}'), agent="coder", headers=sub, tools=TOOLS
    )
    found = [*code, written, tool_result(written["tool_calls"][0]["id"], "cache.py: 3 matches")]
    await feed.turn(session, found, "Read.", agent="coder", headers=sub, tools=TOOLS)
    await feed.turn(session, [user("Title?")], "Adding a cache", headers={"x-tokengrove-purpose": "title"})
    await feed.turn(session, [user("Summarise.")], "A cache was added.", headers={"x-tokengrove-purpose": "summary"})
    await feed.turn(session, [user("Aside.")], "An aside.", headers={"x-tokengrove-purpose": "aux"})
    await feed.turn(session, [*plan, planned, user("Done?")], "Done.", agent="planner", tools=TOOLS)
    await feed.call(session, "set_reward", reward=0.8, agent="planner")
    await feed.call(session, "set_reward", reward=0.5, name="style", agent="coder")
    await feed.call(
        session,
        "set_reward",
        turn=0,
        token_rewards=[0.1 * (at % 5) for at in range(len(sampled("1. Read. 2. Write.")))],
    )
    await feed.call(
        session, "end_session", outcome="Finished", metrics={"steps": 7, "tests": {"passed": 12, "failed": 0}}
    )


async def marked(feed: Feed, session: str = "marks/spans") -> None:
    """Turns that are not trained: by a mark, outside of spans, without logprobs as under a grammar."""
    await feed.start(session)
    history = [AGENT, user("Count.")]
    for number, text in enumerate(("one two three four five six", "seven eight nine ten", "eleven twelve")):
        history += [await feed.turn(session, history, text), user(f"Go on, {number}.")]
    await feed.turn(session, history, '{"n": 13}', response_format={"type": "json_object"})
    await feed.call(session, "mark", turn=0, trainable=True, spans=[[0, 4], [6, 9]])
    await feed.call(session, "mark", turn=1, trainable=False)
    await feed.call(session, "set_reward", step_scores=[0.0, 0.5, 1.0, -1.0])
    await feed.call(session, "end_session", outcome="Timeout")


async def versions(feed: Feed, session: str = "versions/three", first: int = 1) -> None:
    """An answer that three weight versions sampled, because they were updated in the middle of it."""
    await feed.start(session)
    history = [AGENT, user("Talk on.")]
    for version in (first, first + 1, first + 2):
        await feed.weights(version)
        said = Reply(sampled(f"Sampled by version {version}, and by no other."), chunk=3)
        history += [await feed.turn(session, history, said), user("And now?")]
    slow = Reply(sampled("Some of this answer was sampled before the update, " * 9), chunk=2, delay_s=0.01)
    given = feed.engine.chunks
    turn = asyncio.create_task(feed.turn(session, history, slow, "and all that follows after it."))
    await until(lambda: feed.engine.chunks > given + 3)
    await feed.weights(first + 3)
    await turn
    await feed.call(session, "end_session", reward=0.6)


async def group(feed: Feed, name: str, rewards: tuple[float | None, ...], version: int, **start: Any) -> None:
    """A group of sessions of one task, a session for each reward; None: it has none, and has not ended."""
    await feed.weights(version)
    for number, reward in enumerate(rewards):
        session = f"{name}-{number}"
        await feed.start(session, task_id=name, group_id=name, group_size=len(rewards), **start)
        ask = [AGENT, user(f"What is {number} and {number}?")]
        answer = await feed.turn(
            session, ask, call_text("run", f'{{"command": "expr {number} + {number}"}}'), tools=TOOLS
        )
        result = tool_result(answer["tool_calls"][0]["id"], str(2 * number))
        await feed.turn(session, [*ask, answer, result], f"It is {2 * number}.", tools=TOOLS)
        if reward is not None:
            outcome = "Finished" if reward > 0 else "Failed"
            await feed.call(session, "end_session", reward=reward, outcome=outcome, metrics={"tries": number})


async def trained(feed: Feed) -> None:
    """What two trainers tell of the groups `sum-1` to `sum-3`, a step for each group."""
    async with AsyncClient(app=feed.server.app) as client:
        for step in (1, 2, 3):
            samples = (await client.export(filter={"group_id": f"sum-{step}"})).samples
            apart = [each.logprobs + np.sin(each.input_ids) * 0.01 * step for each in samples]
            masked = [each.input_ids % 7 == 0 for each in samples]
            clipped = [each.input_ids % (9 - step) == 0 for each in samples]
            streams = {"logprobs": apart, "is_masked": masked, "is_clipped": clipped}
            await client.annotate(samples, step, streams, {"loss": [0.5 / step] * len(samples)}, trainer="grpo")
        await client.annotate(samples, 3, {"value": [each.logprobs / 2 for each in samples]}, trainer="critic")


async def long_path(feed: Feed, session: str = LONG_PATH) -> None:
    """A path of more than 60,000 tokens in four turns, with a fork near its end."""
    await feed.start(session)
    history: list[Any] = [AGENT, user("word " * 8000)]
    for number in range(4):
        history += [await feed.turn(session, history, _many(12_000, number)), user(f"more {number} " * 400)]
    await feed.turn(session, history, "The end of the long path.")
    await feed.turn(session, history, "Another end of it.")
    await feed.call(session, "set_reward", reward=1.0)


def _many(count: int, number: int) -> Reply:
    words = sampled("the quick brown fox jumps over the lazy dog, 0123456789; and then ", end=False)
    ids = ids_of([words[(at * (number + 1)) % len(words)] for at in range(count)]) + sampled("")
    return Reply(ids, chunk=1000)


async def hostile_texts(feed: Feed, session: str = HOSTILE) -> None:
    """Markup, scripts and odd characters in every field that an agent or an environment writes."""
    every = hostile.EVERYTHING
    facts = {text: text for text in hostile.TEXTS}
    of_the_run = facts | {"nested": {every: [hostile.WITH_NUL, every]}, "project": every, "step": every}
    await feed.start(session, task_id=every, group_id=hostile.CLOSING, metadata=of_the_run)
    made = {"model": every, "tools": [_tool(name) for name in (hostile.IMAGE, hostile.LINK, hostile.PROTO)]}
    headers = {
        "x-tokengrove-state-hash": hostile.SCRIPT,
        "idempotency-key": hostile.IMAGE,
        "x-request-id": hostile.CLOSING,
    }
    ask = [system(every), user(hostile.WITH_NUL)]
    arguments = f'{{"key": {json.dumps(every)}, "half": {hostile.HALF_A_PAIR}}}'
    said = f"<think>\n{every}\n</think>\n\n{every}\n{call_text(hostile.LINK, arguments)}"
    answer = await feed.turn(session, ask, said, agent=hostile.IMAGE, headers=headers, **made)
    history = [*ask, answer, *(tool_result(call["id"], every) for call in answer.get("tool_calls") or ())]
    second = await feed.turn(session, [*history, user("On.")], every, agent=hostile.LINK, **made)
    await feed.turn(session, [*ask, *_forged(every)], every, agent=hostile.SVG, **made)
    goes_on = [*history, user("On."), second, user(every)]
    await feed.turn(session, goes_on, Reply(sampled(every), chunk=64), stop=[hostile.CLOSING], **made)
    for name in hostile.TEXTS:
        await feed.call(session, "set_reward", turn=0, reward=0.5, name=name)
    await feed.call(session, "set_reward", reward=1.0)
    await feed.call(session, "end_session", exit_reason=every, metrics=facts | {"score": 1.0})
    await _hostile_ids(feed)


async def _hostile_ids(feed: Feed) -> None:
    for number, worst in enumerate(hostile.SESSION_IDS):
        text = hostile.TEXTS[number % len(hostile.TEXTS)]
        await feed.start(worst, task_id=text, group_id=hostile.CLOSING, metadata={"project": text})
        await feed.turn(worst, [user(text)], text, model=text, agent=text)
        await feed.call(worst, "set_reward", reward=number / 10)


def _tool(name: str) -> dict[str, Any]:
    every = hostile.EVERYTHING
    parameters = {"type": "object", "properties": {every: {"type": "string", "description": every}}}
    return {"type": "function", "function": {"name": name, "description": every, "parameters": parameters}}


def _forged(every: str) -> list[dict[str, Any]]:
    """An answer that the model never gave, with a call and its result."""
    call = {"id": hostile.IMAGE, "type": "function", "function": {"name": hostile.SCRIPT, "arguments": every}}
    forged = {"role": "assistant", "content": hostile.WITH_NUL, "tool_calls": [call]}
    return [forged, tool_result(hostile.IMAGE, every), user(every)]


async def long_lines(feed: Feed, session: str = LONG_LINES) -> None:
    """A message and metadata of a million characters without a space."""
    await feed.start(session, metadata={"line": hostile.LONG_LINE})
    await feed.turn(session, [user(hostile.LONG_LINE)], "wide" * 2000)


async def unfinished(feed: Feed) -> None:
    """Sessions that go on, one without a turn, and a validation session."""
    await feed.start("live/no-turn", group_id="live")
    await feed.start(LIVE, group_id="live")
    await feed.turn(LIVE, [AGENT, user("Are you there?")], "I am.", tools=TOOLS)
    await feed.start("validation/one", group_id="validation", metadata={"validate": True})
    await feed.turn("validation/one", [user("Which is larger, 9.8 or 9.11?")], "9.8")
    await feed.call("validation/one", "end_session", reward=1.0, outcome="Finished")
    await feed.start("expired/idle")
    await feed.turn("expired/idle", [user("Hello?")], "Hello.")
