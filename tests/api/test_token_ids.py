"""`return_token_ids`: the reply has exactly the ids that the session records, whole, streamed and replayed."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Reply, Script, play
from tests.api.test_streaming import events
from tests.support import Server, call_text, function_tool, sampled, says, serving, user
from tests.wide import CROSSED

CHAT, RESPONSES, MESSAGES = (f"/s/v1/{name}" for name in ("chat/completions", "responses", "messages"))
ADD = [function_tool("add", {"a": {"type": "integer"}})]
THINKING = "<think>\nwhy not\n</think>\n\n"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [user("hi")]},
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "max_tokens": 500, "messages": [user("hi")]},
}


@dataclass(frozen=True)
class Case:
    """An answer and the fields of the request for it."""

    text: str
    more: dict[str, Any] = field(default_factory=dict)


CASES = {
    "text": Case("one, two and three"),
    "reasoning": Case(THINKING + "one, two"),
    "call": Case(THINKING + "first\n" + call_text("add", '{"a": 1}'), {"tools": ADD}),
    "calls": Case(call_text("add", '{"a": 1}') + "\n" + call_text("add", '{"a": 22}'), {"tools": ADD}),
    "one call": Case(
        call_text("add", '{"a": 1}') + call_text("add", '{"a": 2}'), {"tools": ADD, "parallel_tool_calls": False}
    ),
    "broken call": Case('<tool_call>\n{"name": "add", "argu', {"tools": ADD}),
    "stop string": Case("one, two STOP and three", {"stop": ["STOP"]}),
    "length": Case("one, two and three", {"max_tokens": 4}),
    "choices": Case(THINKING + "one, two", {"n": 3}),
    "choices with stop": Case("one, two STOP", {"n": 2, "stop": "two"}),
}


def always(text: str, chunk: int) -> Script:
    reply = Reply(sampled(text), chunk=chunk)
    return lambda _: reply


async def recorded(server: Server) -> tuple[list[int], list[list[int]], list[list[float]]]:
    """The prompt of the session's turns, and the ids and logprobs of their outputs, as exported."""
    samples = await server.export(layout="individual")
    prompts, outputs, logprobs = [], [], []
    for sample in samples:
        start, end = sample["turns"][0]["span"]
        assert end == len(sample["input_ids"])
        prompts.append(sample["input_ids"][:start])
        outputs.append(sample["input_ids"][start:])
        logprobs.append(float32(sample["logprobs"][start:]))
    assert all(prompt == prompts[0] for prompt in prompts)
    return prompts[0], outputs, logprobs


def joined(chunks: Iterable[Any], choice: int) -> tuple[list[int], list[float]]:
    """The ids and logprobs of one choice of a stream."""
    own = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice]
    ids = [token for part in own for token in part.get("token_ids") or ()]
    entries = [entry for part in own if part["logprobs"] for entry in part["logprobs"]["content"]]
    return ids, float32(entry["logprob"] for entry in entries)


def float32(values: Iterable[float]) -> list[float]:
    """The values as they are stored: replies write the same numbers with more digits."""
    return array("f", values).tolist()


@CROSSED
@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("logprobs", [False, True])
async def test_a_chat_reply_and_its_chunks_have_the_recorded_ids(
    tmp_path: Path, name: str, chunk: int, logprobs: bool
) -> None:
    case = CASES[name]
    async with serving(tmp_path, always(case.text, chunk)) as server:
        body = {**BODIES[CHAT], **case.more, "return_token_ids": True, "logprobs": logprobs}
        whole = await server.ok(CHAT, body)
        prompt, outputs, sampled_logprobs = await recorded(server)
        assert whole["prompt_token_ids"] == prompt == server.prompts()[0]
        assert [choice["token_ids"] for choice in whole["choices"]] == outputs
        for choice, values in zip(whole["choices"], sampled_logprobs, strict=True):
            shown = choice["logprobs"] and float32(entry["logprob"] for entry in choice["logprobs"]["content"])
            assert shown == (values if logprobs else None)
        *chunks, done = events((await server.post(CHAT, {**body, "stream": True})).text)
        assert done == "[DONE]"
        assert chunks[0]["prompt_token_ids"] == prompt
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
        for index, (ids, values) in enumerate(zip(outputs, sampled_logprobs, strict=True)):
            assert joined(chunks, index) == (ids, values if logprobs else [])


@pytest.mark.parametrize("name", CASES)
async def test_the_message_of_a_stream_is_the_same_with_and_without_ids(tmp_path: Path, name: str) -> None:
    case = CASES[name]

    def message(chunks: list[Any]) -> dict[str, list[str]]:
        pieces: dict[str, list[str]] = {}
        for choice in (part for chunk in chunks for part in chunk["choices"]):
            kinds = {key: choice["delta"].get(key) or "" for key in ("content", "reasoning_content")}
            for call in choice["delta"].get("tool_calls", ()):
                kinds[f"call {call['index']}"] = call["function"].get("name", "") + call["function"]["arguments"]
            for kind, text in kinds.items():
                pieces.setdefault(f"{choice['index']} {kind}", []).append(text)
            assert choice["finish_reason"] is None or choice["delta"] == {}
        return {kind: ["".join(texts)] for kind, texts in pieces.items()}

    async with serving(tmp_path, always(case.text, 1)) as server:
        body = {**BODIES[CHAT], **case.more, "stream": True}
        *plain, _ = events((await server.post(CHAT, body)).text)
        *with_ids, _ = events((await server.post(CHAT, {**body, "return_token_ids": True, "logprobs": True})).text)
        assert message(with_ids) == message(plain)
        assert not any("token_ids" in choice for chunk in plain for choice in chunk["choices"])


@CROSSED
@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize("name", ["text", "reasoning", "call", "calls", "broken call"])
async def test_responses_and_messages_have_the_recorded_ids(tmp_path: Path, path: str, name: str) -> None:
    case = CASES[name]
    tools: list[Any] = []
    if case.more:
        function = ADD[0]["function"]
        flat = {"name": "add", "description": function["description"]}
        parameters = "input_schema" if path == MESSAGES else "parameters"
        tools = [{**flat, parameters: function["parameters"], "type": "custom" if path == MESSAGES else "function"}]
    async with serving(tmp_path, always(case.text, 1)) as server:
        body = {**BODIES[path], "tools": tools, "return_token_ids": True}
        whole = await server.ok(path, body)
        prompt, outputs, _ = await recorded(server)
        assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, outputs[0])
        text = (await server.post(path, {**body, "stream": True})).text
        found = events("\n".join(line for line in text.split("\n") if not line.startswith("event: ")))
        if path == MESSAGES:
            first, last = found[0]["message"], next(event for event in found if event["type"] == "message_delta")
        else:
            first, last = found[0]["response"], found[-2]["response"]
            assert last["prompt_token_ids"] == prompt and "token_ids" not in first
        assert (first["prompt_token_ids"], last["token_ids"]) == (prompt, outputs[0])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_without_the_field_no_reply_has_ids(tmp_path: Path, path: str, stream: bool) -> None:
    async with serving(tmp_path, says("yes", "yes")) as server:
        for more in ({}, {"return_token_ids": False}):
            response = await server.post(path, {**BODIES[path], **more, "stream": stream})
            assert response.status_code == 200
            assert "token_ids" not in response.text and "x-tokengrove-ignored" not in response.headers


@pytest.mark.parametrize("path", BODIES)
async def test_return_token_ids_must_be_a_boolean(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says()) as server:
        response = await server.post(path, {**BODIES[path], "return_token_ids": "yes"})
        assert response.status_code == 400
        assert "'return_token_ids' must be true or false" in response.json()["error"]["message"]


async def test_a_conversation_has_the_ids_of_every_turn(tmp_path: Path) -> None:
    """The prompt of each turn begins with the prompt and the output of the turn before."""
    async with serving(tmp_path, says("one", THINKING + "two", "three")) as server:
        messages = [user("a")]
        replies = []
        for text in "bcd":
            reply = await server.chat(messages, return_token_ids=True)
            replies.append(reply)
            messages += [reply["choices"][0]["message"], user(text)]
        for before, after in itertools.pairwise(replies):
            known = before["prompt_token_ids"] + before["choices"][0]["token_ids"]
            assert after["prompt_token_ids"][: len(known)] == known
        assert [reply["prompt_token_ids"] for reply in replies] == server.prompts()


@CROSSED
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("name", ["reasoning", "calls", "stop string"])
async def test_a_replay_has_the_recorded_ids(tmp_path: Path, name: str, stream: bool, logprobs: bool) -> None:
    case = CASES[name]
    async with serving(tmp_path, play([Reply(sampled(case.text))])) as server:
        body = {**BODIES[CHAT], **case.more, "return_token_ids": True, "logprobs": logprobs}
        keyed = {"headers": {"idempotency-key": "k"}}
        first = await server.ok(CHAT, body, **keyed)
        again = await server.post(CHAT, {**body, "stream": stream}, **keyed)
        if stream:
            *chunks, _ = events(again.text)
            ids, values = joined(chunks, 0)
            assert chunks[0]["prompt_token_ids"] == first["prompt_token_ids"]
        else:
            assert again.json()["prompt_token_ids"] == first["prompt_token_ids"]
            (choice,) = again.json()["choices"]
            ids, values = joined([{"choices": [choice]}], 0)
        _, (output,), (expected,) = await recorded(server)
        assert ids == output
        assert values == (expected if logprobs else [])


async def test_logprobs_may_name_tokens_by_their_ids(tmp_path: Path) -> None:
    """As vLLM does, so that a client which knows only logprobs finds the ids."""
    async with serving(tmp_path, says(*[THINKING + "yes"] * 3)) as server:
        fields = {"logprobs": True, "return_tokens_as_token_ids": True}
        whole = await server.chat([user("hi")], **fields, top_logprobs=2)
        entries = whole["choices"][0]["logprobs"]["content"]
        _, (output,), _ = await recorded(server)
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in output]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert all(other["token"].startswith("token_id:") for entry in entries for other in entry["top_logprobs"])
        assert "token_ids" not in whole["choices"][0] and "prompt_token_ids" not in whole
        *chunks, _ = events((await server.post(CHAT, {**BODIES[CHAT], **fields, "stream": True})).text)
        parts = [part for chunk in chunks for part in chunk["choices"] if part["logprobs"]]
        shown = [entry["token"] for part in parts for entry in part["logprobs"]["content"]]
        assert shown == [f"token_id:{token}" for token in output]
        plain = await server.chat([user("hi")], return_tokens_as_token_ids=True)
        assert plain["choices"][0]["logprobs"] is None


async def test_ids_of_a_closed_call_come_after_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the turn is committed, a stream shows neither the tokens that close a call nor the end token."""
    from proxy.turns.commits import Commits

    shown: list[list[int]] = []
    place = Commits._place

    async def seen(self: Commits, turn: Any) -> Any:
        ids = [token for delta in turn.deltas for token in getattr(delta, "ids", ())]
        shown.append(ids)
        return await place(self, turn)

    monkeypatch.setattr(Commits, "_place", seen)
    text, plain = call_text("add", '{"a": 1}'), "one two"
    async with serving(tmp_path, says(text, plain)) as server:
        for more in ({"tools": ADD}, {}):
            body = {**BODIES[CHAT], **more, "stream": True, "return_token_ids": True}
            *_, done = events((await server.post(CHAT, body)).text)
            assert done == "[DONE]"
    closing = sampled(text).tolist()
    assert 0 < len(shown[0]) < len(closing) - 2 and shown[0] == closing[: len(shown[0])]
    assert shown[1] == sampled(plain).tolist()[:-1]
