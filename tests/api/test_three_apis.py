"""All APIs share one tree: a conversation may continue over another API. Errors have the envelope of the called API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.scripts import Fault, Reply, Script, play
from tests.support import Server, call_text, function_tool, sampled, says, serving, user
from tests.wide import CROSSED
from tokengrove.errors import EngineUnavailable, TooManyRequests

CHAT, RESPONSES, MESSAGES = "/s/v1/chat/completions", "/s/v1/responses", "/s/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
PATHS = (CHAT, RESPONSES, MESSAGES)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = function_tool("add", {"a": {"type": "integer"}})
MESSAGES_TOOL = {"name": "add", "description": "does add", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", "name": "add", "description": "does add", "parameters": SCHEMA, "strict": True}


def body(path: str, text: str = "hi", **more: Any) -> dict[str, Any]:
    if path == RESPONSES:
        return {"model": "m", "input": text, **more}
    limit = {"max_tokens": 50} if path == MESSAGES else {}
    return {"model": "m", "messages": [user(text)], **limit, **more}


async def test_one_chain_over_chat_then_messages_then_responses(tmp_path: Path) -> None:
    texts = ("<think>\nwhy\n</think>\n\n" + call_text("add", '{"a": 1}'), "two", "three")
    async with serving(tmp_path, says(*texts)) as server:
        answer = await server.answer([{"role": "system", "content": "S"}, user("q")], tools=[TOOL])
        (call,) = answer["tool_calls"]
        use = {"type": "tool_use", "id": call["id"], "name": "add", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "1"}
        conversation = [user("q"), {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        reply = await server.ok(
            MESSAGES,
            {"model": "m", "max_tokens": 50, "system": "S", "messages": conversation, "tools": [MESSAGES_TOOL]},
        )
        assert reply["content"][-1]["text"] == "two"
        items = [
            user("q"),
            {"type": "function_call", "call_id": call["id"], "name": "add", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": call["id"], "output": "1"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
            user("more"),
        ]
        await server.ok(RESPONSES, {"model": "m", "instructions": "S", "input": items, "tools": [RESPONSES_TOOL]})
        tree = await server.tree()
        assert [(node["api"], node["reason"]) for node in tree] == [
            ("chat", "first"),
            ("messages", "continued"),
            ("responses", "continued"),
        ]
        (sample,) = await server.export()
        assert sum(sample["loss_mask"]) == sum(node["output_tokens"] for node in tree)


async def test_a_moving_cache_control_and_a_billing_block_are_the_same_node(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        for turn in range(2):
            mark = {"cache_control": {"type": "ephemeral"}}
            history: list[Any] = [user("q")]
            if turn:
                history += [{"role": "assistant", "content": [{"type": "text", "text": "one"}]}, user("more")]
            last = history[-1]
            history[-1] = {"role": "user", "content": [{"type": "text", "text": last["content"], **mark}]}
            system = [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={turn}"},
                {"type": "text", "text": "You are an agent.", **(mark if turn else {})},
            ]
            await server.ok(MESSAGES, {"model": "m", "max_tokens": 20, "system": system, "messages": history})
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_previous_response_id_continues_from_the_store_also_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        first = await server.ok(RESPONSES, body(RESPONSES, instructions="S"))
    async with serving(tmp_path, says("two", "three")) as server:
        more = {"previous_response_id": first["id"], "instructions": "S"}
        second = await server.ok(RESPONSES, body(RESPONSES, "more", **more))
        assert second["previous_response_id"] == first["id"]
        await server.ok(RESPONSES, body(RESPONSES, "other", previous_response_id=first["id"]))
        tree = await server.tree()
        assert [node["reason"] for node in tree] == ["first", "continued", "system_changed"]
        refused = await server.post("/t/v1/responses", body(RESPONSES, previous_response_id=first["id"]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")


@pytest.mark.parametrize("answer", ["one", f"<think>\nhm\n</think>\n\none\n{call_text('look', '{}')}"])
async def test_an_answer_that_is_sent_with_its_id_counts_once(tmp_path: Path, answer: str) -> None:
    """livekit-agents sends the answer next to `previous_response_id`; the prompt must have it once."""
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    more = {"model": "m", "tools": [tool]}
    async with serving(tmp_path, says(answer, "two", "three", "four")) as server:
        first = await server.ok(RESPONSES, {**more, "input": [user("hi")]})
        said = [{"role": "assistant", "content": "one"}, *(i for i in first["output"] if i["type"] == "function_call")]
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "r"} for item in said[1:]]
        more |= {"previous_response_id": first["id"]}
        for repeated in ([], said, [{"role": "assistant", "content": "own words"}, *said[1:]]):
            await server.ok(RESPONSES, {**more, "input": [*repeated, *results, user("more")]})
        without, once, own = [node["prompt_tokens"] for node in await server.tree()][1:]
        assert without == once < own
        assert [node["reason"] for node in await server.tree()][:3] == ["first", "continued", "resampled"]


async def test_a_developer_message_after_the_previous_response_stays_after_the_history(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        first = await server.ok(RESPONSES, body(RESPONSES, instructions="S"))
        items = [{"role": "developer", "content": "be quick"}, user("more")]
        more = {"model": "m", "input": items, "instructions": "S", "previous_response_id": first["id"]}
        await server.ok(RESPONSES, more)
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]


async def test_an_item_reference_stands_for_the_answer(tmp_path: Path) -> None:
    async with serving(tmp_path, says("<think>\nhm\n</think>\n\none", "two")) as server:
        first = await server.ok(RESPONSES, body(RESPONSES))
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        await server.ok(RESPONSES, {"model": "m", "input": [user("hi"), *references, user("more")]})
        assert [node["reason"] for node in await server.tree()] == ["first", "continued"]
        unknown = {"type": "item_reference", "id": "msg_" + "0" * 32}
        refused = await server.post(RESPONSES, {"model": "m", "input": [user("hi"), unknown]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "input")


@pytest.mark.parametrize("drop_reasoning", [False, True])
async def test_of_equal_answers_the_one_whose_item_ids_are_echoed_is_continued(
    tmp_path: Path, drop_reasoning: bool
) -> None:
    async with serving(tmp_path, says(*["<think>\nhm\n</think>\n\nsame"] * 3, "next")) as server:
        include = ["reasoning.encrypted_content"]
        replies = [await server.ok(RESPONSES, body(RESPONSES, include=include)) for _ in range(3)]
        items = [item for item in replies[1]["output"] if not (drop_reasoning and item["type"] == "reasoning")]
        await server.ok(RESPONSES, {"model": "m", "input": [user("hi"), *items, user("go on")]})
        tree = await server.tree()
        assert (tree[3]["reason"], tree[3]["parent_id"]) == ("continued", replies[1]["id"])


async def test_of_equal_answers_the_one_whose_signature_is_echoed_is_continued(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["<think>\nhm\n</think>\n\nsame"] * 3, "next")) as server:
        replies = [await server.ok(MESSAGES, body(MESSAGES)) for _ in range(3)]
        history = [user("hi"), {"role": "assistant", "content": replies[1]["content"]}, user("go on")]
        await server.ok(MESSAGES, {"model": "m", "max_tokens": 20, "messages": history})
        tree = await server.tree()
        assert (tree[3]["reason"], tree[3]["parent_id"]) == ("continued", replies[1]["id"])


@CROSSED
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
async def test_a_request_without_a_model_gets_the_served_one(tmp_path: Path, path: str, model: dict[str, Any]) -> None:
    async with serving(tmp_path, says("one", "two"), served_model_name="org/served") as server:
        nameless = {name: value for name, value in body(path).items() if name != "model"} | model
        assert (await server.ok(path, nameless))["model"] == "org/served"
        assert (await server.ok(path, body(path, "more")))["model"] == "m"
        assert [node["model"] for node in await server.tree()] == ["org/served", "m"]
        assert {turn["model"] for sample in await server.export() for turn in sample["turns"]} == {"org/served", "m"}


async def test_input_tokens_equals_the_prompt_tokens_of_the_response(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three")) as server:
        asked = {**body(RESPONSES), "instructions": "S", "tools": [RESPONSES_TOOL]}
        first = await server.ok(RESPONSES, asked)
        for body_sent in (asked, {**asked, "previous_response_id": first["id"]}):
            counted = await server.ok(f"{RESPONSES}/input_tokens", {**body_sent, "model": None})
            reply = await server.ok(RESPONSES, body_sent)
            assert counted == {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]}
        assert len(await server.tree()) == 3


async def test_count_tokens_equals_the_prompt_tokens_of_the_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        history: list[Any] = [user("q")]
        for _ in range(2):
            asked = {"model": "m", "system": "S", "messages": history, "tools": [MESSAGES_TOOL]}
            counted = await server.ok(COUNT, asked)
            reply = await server.ok(MESSAGES, {**asked, "max_tokens": 20})
            usage = reply["usage"]
            assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
            history = [*history, {"role": "assistant", "content": reply["content"]}, user("more")]


# Errors -------------------------------------------------------------------------------------------------------------


def check_envelope(path: str, response: httpx.Response, status: int, kind: str, code: str | None = None) -> None:
    """Check an error: `kind` is Anthropic's error type, `code` OpenAI's error code."""
    anthropic = path.startswith(MESSAGES)
    assert response.status_code == (529 if anthropic and status == 503 else status), response.text
    error = response.json()["error"]
    assert error["message"]
    if anthropic:
        assert response.json()["type"] == "error" and response.json()["request_id"].startswith("req_")
        assert error["type"] == kind
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert code is None or error["code"] == code
    if status in (429, 503):
        assert 1 <= int(response.headers["retry-after"]) <= 30


def raising(error: Exception) -> Script:
    def script(request: GenerateRequest) -> Reply:
        raise error

    return script


FAILS = [Reply(sampled("x"), fault=Fault.ERROR)] * 9
HANGS = [Reply(sampled("x"), fault=Fault.HANG)] * 9
CASES: dict[str, tuple[Callable[[], Script], dict[str, Any], int, str, str]] = {
    "engine_failed": (lambda: play(FAILS), {}, 502, "api_error", "engine_failed"),
    "engine_timeout": (lambda: play(HANGS), {"engine_timeout_s": 0.05}, 504, "timeout_error", "timeout"),
    "unavailable": (lambda: raising(EngineUnavailable("paused")), {}, 503, "overloaded_error", "engine_unavailable"),
    "rate": (lambda: raising(TooManyRequests("full")), {}, 429, "rate_limit_error", "rate_limit_exceeded"),
    "body": (lambda: says("x"), {"max_body_bytes": 5}, 413, "request_too_large", "body_too_large"),
    "key": (lambda: says("x"), {"admin_key": "k"}, 401, "authentication_error", "invalid_api_key"),
    "context": (lambda: says("x"), {"max_context_tokens": 5}, 400, "invalid_request_error", "context_length_exceeded"),
}


@CROSSED
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", CASES)
async def test_every_error_has_the_envelope_of_its_api(tmp_path: Path, case: str, path: str, stream: bool) -> None:
    script, configured, status, kind, code = CASES[case]
    async with serving(tmp_path, script(), **configured) as server:
        response = await server.post(path, body(path, stream=stream))
        check_envelope(path, response, status, kind, code)


@pytest.mark.parametrize("path", [*PATHS, COUNT])
async def test_bad_bodies_have_errors_in_the_envelope_of_their_api(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says("x")) as server:
        for content in (b"{", b"\xff", b"[]", b"5", b'{"model": "m"}', b'{"messages": 5, "input": 5}'):
            response = await server.http.post(path, content=content)
            check_envelope(path, response, 400, "invalid_request_error")
        check_envelope(path, await server.http.get(path), 405, "invalid_request_error", "method_not_allowed")


@pytest.mark.parametrize("path", PATHS)
async def test_a_closed_session_has_the_error_envelope_of_its_api(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says("x")) as server:
        await server.chat([user("hi")])
        await server.ok("/s/rl/end_session", {})
        check_envelope(path, await server.post(path, body(path)), 403, "permission_error", "session_closed")


async def test_a_prompt_that_is_too_long_has_the_message_that_makes_clients_compact(tmp_path: Path) -> None:
    async with serving(tmp_path, says("x"), max_context_tokens=5) as server:
        said = (await server.post(MESSAGES, body(MESSAGES))).json()["error"]["message"]
        tokens = int(said.split()[4])
        assert said == f"prompt is too long: {tokens} tokens > 5 maximum"
        failed = await server.post(RESPONSES, body(RESPONSES))
        assert failed.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "event"), [(CHAT, '"error"'), (RESPONSES, "response.failed"), (MESSAGES, "event: error")]
)
async def test_a_failure_in_the_middle_is_an_error_event_in_every_api(tmp_path: Path, path: str, event: str) -> None:
    script = play([Reply(sampled("one two three"), fault=Fault.ERROR, fault_after=3)])
    async with serving(tmp_path, script) as server:
        text = (await server.post(path, body(path, stream=True))).text
        events = [block for block in text.split("\n\n") if block and block != "data: [DONE]"]
        assert event in events[-1]
        assert ("[DONE]" in text) == (path == RESPONSES)
        assert not any(end in text for end in ('finish_reason":"', "message_stop", "response.completed"))


@CROSSED
@pytest.mark.parametrize("depth", [200, 300, 600, 900])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_deep_bodies_are_answered_or_refused_before_anything_is_sampled(
    tmp_path: Path, path: str, stream: bool, depth: int
) -> None:
    deep: Any = {}
    for _ in range(depth):
        deep = {"a": deep}
    tool = {CHAT: function_tool("f", {"a": deep}), MESSAGES: {**MESSAGES_TOOL, "input_schema": deep}}
    tools = [tool.get(path, {**RESPONSES_TOOL, "parameters": deep})]
    async with serving(tmp_path, lambda request: Reply(sampled("x"))) as server:
        for fields in ({"metadata": deep}, {"tools": tools}):
            sent = len(server.engine.requests)
            response = await server.post(path, body(path, stream=stream, **fields))
            assert response.status_code in (200, 400), response.text
            assert (len(server.engine.requests) == sent) == (response.status_code == 400)
            assert response.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    *("model", "messages", "input", "tools", "tool_choice", "stream", "max_tokens", "system", "instructions", "text"),
    *("reasoning", "include", "thinking", "output_config", "stop_sequences", "metadata", "previous_response_id"),
    *("truncation", "store", "temperature", "top_logprobs", "response_format", "n", "logprobs", "parallel_tool_calls"),
)
SHAPES = st.sampled_from(
    [
        {"role": "user", "content": []},
        {"type": "reasoning", "id": 5},
        {"type": "function_call"},
        {"type": "message", "role": "assistant"},
        {"role": "assistant", "content": [{"type": "tool_use"}]},
        {"role": "user", "content": [{"type": "tool_result", "content": {}}]},
    ]
)


@pytest.fixture
def waiting_server(tmp_path: Path) -> Iterator[tuple[asyncio.Runner, Server]]:
    """A server for many examples, and what runs its coroutines."""
    served = serving(tmp_path, lambda request: Reply(sampled("x")))
    with asyncio.Runner() as runner:
        yield runner, runner.run(served.__aenter__())
        runner.run(served.__aexit__(None, None, None))


@pytest.mark.parametrize("path", [*PATHS, COUNT])
@settings(max_examples=60)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), json_values | st.lists(SHAPES | json_values, max_size=3)))
def test_fuzzed_bodies_never_give_a_500(
    waiting_server: tuple[asyncio.Runner, Server], path: str, fields: dict[str, Any]
) -> None:
    runner, server = waiting_server

    async def send() -> None:
        response = await server.post(path, {**body(path), **fields})
        assert response.status_code in (200, 400, 404), response.text
        await still_works(server, path)

    runner.run(send())


async def still_works(server: Server, path: str) -> None:
    assert (await server.post(path, body(path))).status_code == 200
