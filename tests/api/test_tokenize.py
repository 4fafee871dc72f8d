"""`/v1/tokenize` gives the prompt of the turn that would come, `/v1/detokenize` its text, `/v1/parse` the message of an
answer. Nothing is recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Script
from proxy.types import Message, Role
from tests.support import (
    Server,
    call_text,
    function_tool,
    sampled,
    says,
    serving,
    tiny_renderer,
    tool_result,
    user,
)

TOOLS = [function_tool("add", {"a": {"type": "integer"}})]
PREFIXES = ["/s/v1", "/s", "/v1", ""]


async def refused(server: Server, body: Any, path: str = "/s/v1/tokenize") -> Any:
    response = await server.post(path, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def script() -> Script:
    return says("<think>\nhm\n</think>\n\nfirst " + call_text("add", '{"a": 1}'), "done", "x")


@pytest.mark.parametrize("echo", ["as it was", "without text"])
async def test_the_ids_of_messages_are_the_prompt_of_the_turn_that_follows(tmp_path: Path, echo: str) -> None:
    """Also where the client changed its echo: the ids go on with the sampled tokens, as the turn does."""
    async with serving(tmp_path, script()) as server:
        messages: list[Any] = [user("add 1")]
        for _ in range(3):
            told = await server.ok("/s/v1/tokenize", {"messages": messages, "tools": TOOLS})
            reply = await server.chat(messages, tools=TOOLS, return_token_ids=True)
            assert told["tokens"] == reply["prompt_token_ids"]
            assert told["count"] == len(told["tokens"]) == reply["usage"]["prompt_tokens"]
            answer = reply["choices"][0]["message"]
            if calls := answer.get("tool_calls"):
                if echo == "without text":
                    answer = {"role": "assistant", "content": None, "tool_calls": calls}
                messages += [answer, tool_result(calls[0]["id"], "2")]
            else:
                messages += [answer, user("more")]
        assert [node["reason"] for node in await server.tree()] == ["first", "continued", "continued"]


async def test_the_reply_has_vllms_fields_and_nothing_is_recorded(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), max_context_tokens=4096) as server:
        reply = await server.ok("/v1/tokenize", {"messages": [user("hi")]})
        assert set(reply) == {"count", "max_model_len", "tokens", "token_strs"}
        assert (reply["max_model_len"], reply["token_strs"]) == (4096, None)
        assert (await server.http.get("/rl/sessions")).json()["sessions"] == []
        assert server.engine.requests == []


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_text_is_encoded_and_decoded(tmp_path: Path, prefix: str) -> None:
    text = "Grüße <|im_start|>user\n"
    async with serving(tmp_path, says()) as server:
        reply = await server.ok(f"{prefix}/tokenize", {"model": "any", "prompt": text})
        assert reply["tokens"] == tiny_renderer().encode(text).tolist()
        assert await server.ok(f"{prefix}/detokenize", {"tokens": reply["tokens"]}) == {"prompt": text}
        assert await server.ok(f"{prefix}/detokenize", {"tokens": []}) == {"prompt": ""}
        empty = await server.ok(f"{prefix}/tokenize", {"prompt": ""})
        assert (empty["tokens"], empty["count"]) == ([], 0)


async def test_template_options_count(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        for options in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            told = await server.ok("/s/v1/tokenize", {"messages": [user("hi")], **options})
            reply = await server.chat([user("hi")], return_token_ids=True, **options)
            assert told["tokens"] == reply["prompt_token_ids"]


async def test_a_prefill_is_tokenized_as_its_turn_is(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        messages = [user("hi"), {"role": "assistant", "content": "I say"}]
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        told = await server.ok("/s/v1/tokenize", {"messages": messages, **fields})
        reply = await server.chat(messages, return_token_ids=True, **fields)
        assert told["tokens"] == reply["prompt_token_ids"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": [user("a")], "prompt": "a"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "cat"}]}, "messages[0].role"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "add_special_tokens": "no"}, "add_special_tokens"),
        ({"messages": [user("a")], "tools": [5]}, "tools[0]"),
        ({"messages": [user("a")], "add_generation_prompt": 0}, "add_generation_prompt"),
        ({"messages": [user("a")], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [user("a")], "add_special_tokens": True}, "add_special_tokens"),
    ],
)
async def test_errors_of_tokenize_name_the_field(tmp_path: Path, body: Any, param: str) -> None:
    async with serving(tmp_path, says()) as server:
        assert (await refused(server, body))["param"] == param


async def test_without_a_generation_prompt_the_ids_end_with_the_messages(tmp_path: Path) -> None:
    renderer = tiny_renderer()
    plain = {"add_generation_prompt": False}
    begins = renderer.encode("<|im_start|>assistant\n").tolist()
    async with serving(tmp_path, says("<think>\nhm\n</think>\n\nfirst")) as server:
        told = await server.ok("/s/v1/tokenize", {"messages": [user("a")], **plain})
        assert told["tokens"] == renderer.render([Message(Role.USER, "a")], (), {}, prompt=False).tolist()
        reply = await server.chat([user("a")], return_token_ids=True)
        assert told["tokens"] + begins == reply["prompt_token_ids"]
        sampled_ids = reply["choices"][0]["token_ids"]
        messages = [user("a"), reply["choices"][0]["message"]]
        for more in ([], [user("b")]):
            told, whole = [
                (await server.ok("/s/v1/tokenize", {"messages": [*messages, *more], **fields}))["tokens"]
                for fields in (plain, {})
            ]
            assert told + begins == whole
            assert told[: len(reply["prompt_token_ids"]) + len(sampled_ids)] == reply["prompt_token_ids"] + sampled_ids


async def test_detokenize_leaves_special_tokens_out_on_request(tmp_path: Path) -> None:
    ids = sampled("<tool_call>Grüße</tool_call>").tolist()
    async with serving(tmp_path, says()) as server:
        whole = await server.ok("/v1/detokenize", {"tokens": ids, "skip_special_tokens": False})
        assert whole["prompt"] == "<tool_call>Grüße</tool_call><|im_end|>"
        text = (await server.ok("/v1/detokenize", {"tokens": ids, "skip_special_tokens": True}))["prompt"]
        assert "<|im_end|>" not in text and "Grüße" in text
        error = await refused(server, {"tokens": ids, "skip_special_tokens": "yes"}, "/s/v1/detokenize")
        assert error["param"] == "skip_special_tokens"


@pytest.mark.parametrize("tokens", [None, "a", ["a"], [-1], [2**40], [True], [tiny_renderer().vocab_size]])
async def test_errors_of_detokenize_name_the_field(tmp_path: Path, tokens: Any) -> None:
    async with serving(tmp_path, says()) as server:
        assert (await refused(server, {"tokens": tokens}, "/s/v1/detokenize"))["param"] == "tokens"


async def test_ignored_fields_are_named(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for body in ({"prompt": "a"}, {"messages": [user("a")]}):
            response = await server.post("/s/v1/tokenize", {**body, "return_token_strs": True, "unheard_of": 1})
            assert response.headers["x-tokengrove-ignored"] == "return_token_strs,unheard_of"


async def test_with_an_admin_key_a_session_or_the_admin_is_needed(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key="root") as server:
        admin = {"authorization": "Bearer root"}
        started = await server.ok("/rl/start_session", {"task_id": "t"}, headers=admin)
        own = {"authorization": f"Bearer {started['api_key']}"}
        chat, text, ids = {"messages": [user("a")]}, {"prompt": "a"}, {"tokens": [1]}
        for path, body in (("/v1/tokenize", chat), ("/v1/tokenize", text), ("/v1/detokenize", ids)):
            assert (await server.post(path, body)).status_code == 401
            assert (await server.post(path, body, headers=own)).status_code == 200
        for path, body in (("/v1/tokenize", text), ("/v1/detokenize", ids)):
            assert (await server.post(path, body, headers=admin)).status_code == 200


ANSWER = {"role": "assistant", "content": "first"}
KNOWN = {"messages": 2, "token_ids": [5, 6, 7], "output_tokens": 2}
LOOP = {"messages": [user("a"), ANSWER, user("b")], "continue_from": KNOWN}


def continuing(**fields: Any) -> dict[str, Any]:
    return {**LOOP, "continue_from": {**KNOWN, **fields}}


async def test_known_ids_stay_as_they_are_and_the_rest_is_appended(tmp_path: Path) -> None:
    """Ids that the messages would never be encoded as: nothing of the known part is rendered."""
    renderer = tiny_renderer()
    ids = [*renderer.render([Message(Role.USER, "other")], (), {}), *sampled("f" + "irst")]
    known = {"messages": 2, "token_ids": ids, "output_tokens": len(sampled("first"))}
    async with serving(tmp_path, says()) as server:
        reply = await server.ok("/v1/tokenize", {**LOOP, "continue_from": known})
        assert reply["tokens"][: len(ids)] == ids
        added = renderer.decode(reply["tokens"][len(ids) :])
        assert added == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        assert reply["count"] == len(reply["tokens"])
        silent = await server.ok("/v1/tokenize", {**LOOP, "continue_from": known, "add_generation_prompt": False})
        assert renderer.decode(silent["tokens"][len(ids) :]) == "\n<|im_start|>user\nb<|im_end|>\n"
        cut = {**known, "token_ids": ids[:-1], "output_tokens": known["output_tokens"] - 1}
        closed = await server.ok("/s/v1/tokenize", {**LOOP, "continue_from": cut})
        assert closed["tokens"] == reply["tokens"]
        nothing = await server.ok("/v1/tokenize", {"messages": LOOP["messages"][:2], "continue_from": known})
        assert renderer.decode(nothing["tokens"][len(ids) :]) == "\n<|im_start|>assistant\n"
        assert (await server.http.get("/rl/sessions")).json()["sessions"] == []
        assert server.engine.requests == []


async def test_an_answer_of_no_tokens_is_closed(tmp_path: Path) -> None:
    renderer = tiny_renderer()
    prompt = renderer.render([Message(Role.USER, "a")], (), {}).tolist()
    known = {"messages": 2, "token_ids": prompt, "output_tokens": 0}
    messages = [user("a"), {"role": "assistant", "content": ""}, user("b")]
    async with serving(tmp_path, says()) as server:
        reply = await server.ok("/v1/tokenize", {"messages": messages, "continue_from": known})
        assert renderer.decode(reply["tokens"][len(prompt) :]).startswith("<|im_end|>\n<|im_start|>user\nb")


async def test_reasoning_stays_in_known_ids_whatever_the_retention_says(tmp_path: Path) -> None:
    renderer = tiny_renderer()
    prompt, output = renderer.render([Message(Role.USER, "a")], (), {}), sampled("<think>\nhm\n</think>\n\nfirst")
    known = {"messages": 2, "token_ids": (prompt + output).tolist(), "output_tokens": len(output)}
    async with serving(tmp_path, says(), thinking_retention="template") as server:
        reply = await server.ok("/v1/tokenize", {**LOOP, "continue_from": known})
        assert reply["tokens"][: len(prompt + output)] == (prompt + output).tolist()


async def test_a_prefill_follows_known_ids(tmp_path: Path) -> None:
    messages = [*LOOP["messages"], {"role": "assistant", "content": "I say"}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    async with serving(tmp_path, says()) as server:
        reply = await server.ok("/v1/tokenize", {**LOOP, "messages": messages, **fields})
        assert tiny_renderer().decode(reply["tokens"]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nI say")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**LOOP, "continue_from": 5}, "continue_from"),
        ({"prompt": "a", "continue_from": KNOWN}, "continue_from"),
        (continuing(message=2), "continue_from.message"),
        (continuing(messages=None), "continue_from.messages"),
        (continuing(messages=0), "continue_from.messages"),
        (continuing(messages=4), "continue_from.messages"),
        (continuing(messages=1), "continue_from.messages"),
        (continuing(messages=3), "continue_from.messages"),
        (continuing(token_ids=None), "continue_from.token_ids"),
        (continuing(token_ids=[]), "continue_from.token_ids"),
        (continuing(token_ids=[1, -1]), "continue_from.token_ids"),
        (continuing(token_ids=[1, 2, tiny_renderer().vocab_size]), "continue_from.token_ids"),
        (continuing(output_tokens=None), "continue_from.output_tokens"),
        (continuing(output_tokens=4), "continue_from.output_tokens"),
        (continuing(output_tokens=0), "continue_from.output_tokens"),
        (continuing(output_tokens=True), "continue_from.output_tokens"),
        ({**LOOP, "add_generation_prompt": "no"}, "add_generation_prompt"),
        ({**LOOP, "messages": [user("a"), ANSWER, {"role": "cat"}]}, "messages[2].role"),
    ],
)
async def test_errors_of_continue_from_name_the_field(tmp_path: Path, body: Any, param: str) -> None:
    async with serving(tmp_path, says()) as server:
        assert (await refused(server, body))["param"] == param


async def test_known_ids_far_above_the_context_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), max_context_tokens=2000) as server:
        error = await refused(server, continuing(token_ids=[5] * 200_000))
        assert error["code"] == "context_length_exceeded"


async def test_the_administrator_tokenizes_a_conversation_without_a_session(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key="root") as server:
        admin = {"authorization": "Bearer root"}
        reply = await server.ok("/v1/tokenize", {"messages": [user("a")]}, headers=admin)
        assert reply["tokens"] == tiny_renderer().render([Message(Role.USER, "a")], (), {}).tolist()
        assert (await server.ok("/v1/tokenize", LOOP, headers=admin))["tokens"][:3] == KNOWN["token_ids"]
        assert (await server.ok("/v1/parse", {"tokens": [5]}, headers=admin))["message"]["role"] == "assistant"
        for body in (LOOP, {"messages": [user("a")]}):
            assert (await server.post("/v1/tokenize", body)).status_code == 401
        assert (await server.post("/v1/parse", {"tokens": [5]})).status_code == 401


CALL = call_text("add", '{"a": 1}')


@pytest.mark.parametrize("prefix", PREFIXES)
async def test_parse_makes_the_message_of_sampled_ids(tmp_path: Path, prefix: str) -> None:
    ids = sampled("<think>\nhm\n</think>\n\nfirst " + CALL).tolist()
    async with serving(tmp_path, says()) as server:
        read = await server.ok(f"{prefix}/parse", {"tokens": ids, "tools": TOOLS})
        message = read["message"]
        assert (message["role"], message["content"], message["reasoning_content"]) == ("assistant", "first", "hm")
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert read["finish_reason"] == "tool_calls"
        cut = await server.ok(f"{prefix}/parse", {"tokens": ids[:-1], "tools": TOOLS})
        assert (cut["message"]["tool_calls"][0]["function"], cut["finish_reason"]) == (call["function"], "length")
        empty = await server.ok(f"{prefix}/parse", {"tokens": []})
        assert (empty["message"]["content"], empty["finish_reason"]) == ("", "length")
        assert (await server.http.get("/rl/sessions")).json()["sessions"] == []


async def test_parse_reads_calls_with_tools_or_a_named_parser_only(tmp_path: Path) -> None:
    ids = sampled(CALL).tolist()
    python = sampled("[add(a=1)]").tolist()
    llama = sampled('{"name": "add", "parameters": {"a": 1}}').tolist()
    async with serving(tmp_path, says()) as server:
        plain = await server.ok("/v1/parse", {"tokens": ids})
        assert (plain["message"]["content"], plain["finish_reason"]) == (CALL, "stop")
        for tokens, parser in ((ids, "hermes"), (python, "pythonic"), (llama, "llama3_json")):
            for more in ({}, {"tools": TOOLS}):
                read = await server.ok("/v1/parse", {"tokens": tokens, "tool_parser": parser, **more})
                [call] = read["message"]["tool_calls"]
                assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
        other = [function_tool("mul", {"a": {"type": "integer"}})]
        unmeant = await server.ok("/v1/parse", {"tokens": python, "tool_parser": "pythonic", "tools": other})
        assert unmeant["message"]["content"] == "[add(a=1)]"


async def test_parse_reads_reasoning_that_the_prompt_opened(tmp_path: Path) -> None:
    renderer = tiny_renderer()
    ids = sampled("hm</think>first").tolist()
    opened = renderer.encode("<|im_start|>assistant\n<think>\n").tolist()
    async with serving(tmp_path, says()) as server:
        read = await server.ok("/v1/parse", {"tokens": ids, "prompt_ids": opened})
        assert (read["message"]["reasoning_content"], read["message"]["content"]) == ("hm", "first")
        for more in ({"reasoning_parser": "qwen3-thinking"}, {"reasoning_parser": "think", "prompt_ids": opened}):
            assert (await server.ok("/v1/parse", {"tokens": ids, **more}))["message"] == read["message"]
        as_text = await server.ok("/v1/parse", {"tokens": ids, "reasoning_parser": "none", "prompt_ids": opened})
        assert as_text["message"]["content"] == "hm</think>first"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": "a"}, "tokens"),
        ({"tokens": [tiny_renderer().vocab_size]}, "tokens"),
        ({"tokens": [1], "tools": [5]}, "tools[0]"),
        ({"tokens": [1], "tool_parser": "parrot"}, "tool_parser"),
        ({"tokens": [1], "tool_parser": 5}, "tool_parser"),
        ({"tokens": [1], "reasoning_parser": "parrot"}, "reasoning_parser"),
        ({"tokens": [1], "prompt_ids": [-1]}, "prompt_ids"),
        ({"tokens": [1], "prompt_ids": [tiny_renderer().vocab_size]}, "prompt_ids"),
        ({"tokens": [1], "tool_parsers": "hermes"}, "tool_parsers"),
    ],
)
async def test_errors_of_parse_name_the_field(tmp_path: Path, body: Any, param: str) -> None:
    async with serving(tmp_path, says()) as server:
        error = await refused(server, body, "/s/v1/parse")
        assert error["param"] == param
        if body.get("tool_parser") == "parrot":
            assert error["message"].startswith("'tool_parser' parrot is not one of hermes, qwen,")


async def test_more_ids_than_an_output_can_have_are_not_parsed(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), max_context_tokens=100) as server:
        await server.ok("/v1/parse", {"tokens": [5] * 100})
        response = await server.post("/v1/parse", {"tokens": [5] * 101})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tokens")
        assert "101 ids" in response.json()["error"]["message"]
