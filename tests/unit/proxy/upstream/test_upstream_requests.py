"""What external models receive: each of three APIs in the form of each other, exactly, or refused by name."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import TypeAdapter

from proxy.images.data_urls import data_url
from proxy.models.declared import Upstream
from proxy.protocols.image_sources import image_sources
from proxy.types import INSTRUCTIONS, Api, ImagePart, Message, PromptText, Role, TurnRequest, ids_of
from proxy.upstream.request_body import DEFAULT_MAX_TOKENS, upstream_body, with_images
from tests.unit.proxy.upstream.asking import asking, chat, no_images, parsed
from tests.upstreams import KEY
from tests.vision import image_file
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.options.model import UpstreamApi

APIS, KINDS = [Api.CHAT, Api.RESPONSES, Api.MESSAGES, Api.GOOGLE], list(UpstreamApi)
CHAT, RESPONSES, MESSAGES = KINDS
PICTURE = image_file()
URL = data_url(PICTURE)
BASE64 = URL.partition(",")[2]
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}

ASKED: dict[Api, dict[str, Any]] = {
    Api.CHAT: {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image_url", "image_url": {"url": URL}},
                ],
            },
            {
                "role": "assistant",
                "content": "Let me look.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "call_a", "type": "function", "function": {"name": "look", "arguments": '{"at":"sky"}'}},
                    {"id": "call_b", "type": "function", "function": {"name": "look", "arguments": '{"at":"sea"}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "call_a", "content": "blue"},
            {"role": "tool", "tool_call_id": "call_b", "content": "grey"},
            {"role": "user", "content": "So?"},
        ],
        "tools": [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 50,
    },
    Api.GOOGLE: {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {
                "role": "user",
                "parts": [{"text": "What is this?"}, {"inlineData": {"mimeType": "image/png", "data": BASE64}}],
            },
            {
                "role": "model",
                "parts": [
                    {"text": "Hm.", "thought": True},
                    {"text": "Let me look."},
                    {"functionCall": {"id": "call_a", "name": "look", "args": {"at": "sky"}}},
                    {"functionCall": {"id": "call_b", "name": "look", "args": {"at": "sea"}}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "call_a", "name": "look", "response": {"result": "blue"}}},
                    {"functionResponse": {"id": "call_b", "name": "look", "response": {"result": "grey"}}},
                    {"text": "So?"},
                ],
            },
        ],
        "tools": [
            {"functionDeclarations": [{"name": "look", "description": "Looks.", "parametersJsonSchema": SCHEMA}]}
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}},
        "generationConfig": {
            **{"temperature": 0.5, "topP": 0.9, "maxOutputTokens": 50},
            "thinkingConfig": {"includeThoughts": True},
        },
    },
    Api.RESPONSES: {
        "instructions": "Be brief.",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": URL},
                ],
            },
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
            {"type": "function_call", "call_id": "call_a", "name": "look", "arguments": '{"at":"sky"}'},
            {"type": "function_call", "call_id": "call_b", "name": "look", "arguments": '{"at":"sea"}'},
            {"type": "function_call_output", "call_id": "call_a", "output": "blue"},
            {"type": "function_call_output", "call_id": "call_b", "output": "grey"},
            {"role": "user", "content": "So?"},
        ],
        "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": False}],
        "tool_choice": {"type": "function", "name": "look"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 50,
    },
    Api.MESSAGES: {
        "system": "Be brief.",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is this?"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "Let me look."},
                    {"type": "tool_use", "id": "call_a", "name": "look", "input": {"at": "sky"}},
                    {"type": "tool_use", "id": "call_b", "name": "look", "input": {"at": "sea"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_a", "content": "blue"},
                    {"type": "tool_result", "tool_use_id": "call_b", "content": "grey"},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 50,
    },
}


def received(kind: UpstreamApi, asked: Api) -> dict[str, Any]:
    """What a model receives of `ASKED`: what a client of its API would have sent, streamed, without reasoning."""
    body = copy.deepcopy(ASKED[Api(kind.value)])
    body |= {"model": "gpt-judge", "stream": True}
    if kind is CHAT:
        body["stream_options"] = {"include_usage": True}
        del body["messages"][2]["reasoning_content"]
        if asked is Api.RESPONSES:
            body["tools"][0]["function"]["strict"] = False
    elif kind is RESPONSES:
        body["store"] = False
        del body["input"][1]
        body["input"][0]["type"] = body["input"][-1]["type"] = "message"
        body["input"][0]["content"][1]["detail"] = "auto"
        body["input"][1]["content"] = "Let me look."
        if asked is not Api.RESPONSES:  # a system message is not a field of other APIs
            first = {"type": "message", "role": "system", "content": body.pop("instructions")}
            body["input"].insert(0, first)
    else:
        del body["messages"][1]["content"][0]
        if asked is Api.RESPONSES:
            body["tools"][0]["strict"] = False
    if asked is Api.GOOGLE:  # calls are always parallel
        body.pop("parallel_tool_calls", None)
        body.get("tool_choice", {}).pop("disable_parallel_tool_use", None)
    return body


def seen(asked: Api) -> TurnRequest:
    """The request `ASKED` with its image read."""
    body = copy.deepcopy(ASKED[asked])
    for source in image_sources(body, asked):
        source.put(ImagePart(PICTURE.digest, 0, PICTURE.width, PICTURE.height))
    return parsed(asked, body)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", APIS)
async def test_each_api_reaches_each_kind_in_its_own_form(asked: Api, kind: UpstreamApi) -> None:
    async with asking(kind) as upstream:
        assert await upstream.body(seen(asked), files=[PICTURE]) == received(kind, asked)


def plainly(value: Any) -> Any:
    """A validated value, whose lists are iterators."""
    if isinstance(value, dict):
        return {name: plainly(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | None) else [plainly(item) for item in value]


@pytest.mark.parametrize(
    ("kind", "params", "unknown"),
    [
        (CHAT, CompletionCreateParamsStreaming, set()),
        (RESPONSES, ResponseCreateParamsStreaming, set()),
        (MESSAGES, MessageCreateParamsStreaming, {"temperature", "top_p"}),  # only older models take them
    ],
)
def test_what_a_model_receives_has_the_types_of_its_providers_sdk(
    kind: UpstreamApi, params: Any, unknown: set[str]
) -> None:
    adapter = TypeAdapter(params)
    for asked in APIS:
        body = received(kind, asked)
        known = {name: value for name, value in body.items() if name not in unknown}
        assert plainly(adapter.validate_python(body)) == known


@pytest.mark.parametrize(
    ("kind", "path", "header"),
    [
        (CHAT, "/v1/chat/completions", ("authorization", f"Bearer {KEY}")),
        (RESPONSES, "/v1/responses", ("authorization", f"Bearer {KEY}")),
        (MESSAGES, "/v1/messages", ("x-api-key", KEY)),
    ],
)
async def test_the_key_and_the_request_go_where_the_api_has_them(
    kind: UpstreamApi, path: str, header: tuple[str, str]
) -> None:
    async with asking(kind) as upstream:
        await upstream.ask(chat())
        (asked,) = upstream.fake.asked
        assert asked.path == path and header in asked.headers.items()
        assert ("anthropic-version" in asked.headers) == (kind is MESSAGES)


def written(request: TurnRequest, kind: UpstreamApi, url: str = "https://judge.test/v1") -> dict[str, Any]:
    return upstream_body(request, request.sampling, Upstream(url, kind, "gpt-judge", None, 60.0))


def test_a_plain_request_has_no_field_that_its_client_did_not_set() -> None:
    assert written(chat(), CHAT) == {
        "model": "gpt-judge",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert written(chat(), RESPONSES) == {
        "model": "gpt-judge",
        "input": [{"type": "message", "role": "user", "content": "hi"}],
        "store": False,
        "stream": True,
    }
    assert written(chat(), MESSAGES) == {
        "model": "gpt-judge",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": DEFAULT_MAX_TOKENS,
        "stream": True,
    }


@pytest.mark.parametrize(
    ("given", "chat_has", "responses_has", "messages_has"),
    [
        ({"temperature": 1}, {"temperature": 1}, {"temperature": 1}, {"temperature": 1}),
        ({"stop": ["END"]}, {"stop": ["END"]}, "stop", {"stop_sequences": ["END"]}),
        ({"seed": 3}, {"seed": 3}, "seed", "seed"),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}, "presence_penalty", "presence_penalty"),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}, "frequency_penalty", "frequency_penalty"),
        ({"logit_bias": {"7": 1}}, {"logit_bias": {"7": 1}}, "logit_bias", "logit_bias"),
        ({"top_k": 9}, "top_k", "top_k", {"top_k": 9}),
        ({"top_k": -1, "presence_penalty": 0.0}, {"presence_penalty": 0.0}, {}, {}),
        ({"min_p": 0.1}, "min_p", "min_p", "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "repetition_penalty", "repetition_penalty"),
        ({"min_tokens": 2}, "min_tokens", "min_tokens", "min_tokens"),
        ({"stop_token_ids": [2]}, "stop_token_ids", "stop_token_ids", "stop_token_ids"),
        ({"include_stop_str_in_output": True}, *["include_stop_str_in_output"] * 3),
        ({"n": 2}, "n", "n", "n"),
        ({"logprobs": True}, "logprobs", "logprobs", "logprobs"),
        ({"return_token_ids": True}, "return_token_ids", "return_token_ids", "return_token_ids"),
        ({"return_completion_text": True}, *["return_completion_text"] * 3),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}},
         {"output_config": {"effort": "low"}}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}},
         {"thinking": {"type": "disabled"}}),
        ({"chat_template_kwargs": {"x": 1}}, *["chat_template_kwargs"] * 3),
        ({"chat_template_kwargs": {"enable_thinking": True}}, *["chat_template_kwargs"] * 3),
        ({"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_object"}},
         {"text": {"format": {"type": "json_object"}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}},
            {"text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}},
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, *["structured_outputs.regex"] * 3),
        ({"ebnf": 'root ::= "a"'}, *["ebnf"] * 3),
        ({"structured_outputs": {"choice": ["a"]}}, *["structured_outputs.choice"] * 3),
        ({"tool_choice": "none", "parallel_tool_calls": False}, {}, {}, {}),
    ],
)  # fmt: skip
def test_a_field_is_sent_in_the_form_of_the_kind_or_refused_by_name(
    given: dict[str, Any], chat_has: Any, responses_has: Any, messages_has: Any
) -> None:
    for kind, has in ((CHAT, chat_has), (RESPONSES, responses_has), (MESSAGES, messages_has)):
        if isinstance(has, str):
            with pytest.raises(UnsupportedParameter, match="is not supported by this model") as caught:
                written(chat(**given), kind)
            assert caught.value.param == has
        else:
            assert written(chat(**given), kind) == {**written(chat(), kind), **has}


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_token_ids_and_texts_are_refused(kind: UpstreamApi) -> None:
    of_ids = replace(chat(), api=Api.GENERATE, messages=(), input_ids=ids_of([1, 2]))
    of_text = replace(chat(), api=Api.COMPLETIONS, messages=(), text=PromptText("once"))
    within = replace(chat(), messages=(Message(Role.USER, "hi", name="tokens:1f"),))
    for request, param in ((of_ids, "input_ids"), (of_text, "prompt"), (within, "messages[0]")):
        with pytest.raises(UnsupportedParameter) as caught:
            written(request, kind)
        assert caught.value.param == param


def test_a_refused_field_has_the_name_of_the_clients_api() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stop_sequences": ["END"]}
    with pytest.raises(UnsupportedParameter) as caught:
        written(parsed(Api.MESSAGES, body), RESPONSES)
    assert caught.value.param == "stop_sequences"


def test_a_prefill_is_continued_by_messages_only() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    request = parsed(Api.MESSAGES, {"messages": messages, "max_tokens": 9})
    assert written(request, MESSAGES)["messages"] == messages
    for kind in (CHAT, RESPONSES):
        with pytest.raises(UnsupportedParameter) as caught:
            written(request, kind)
        assert caught.value.param == "messages"


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}])
def test_thinking_reaches_a_model_of_the_same_api_as_it_was_sent(thinking: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    request = parsed(Api.MESSAGES, {**body, "thinking": thinking, "output_config": {"effort": "high"}})
    sent = written(request, MESSAGES)
    assert (sent["thinking"], sent["output_config"]) == (thinking, {"effort": "high"})
    assert written(request, CHAT)["reasoning_effort"] == "high"


def test_disabled_thinking_is_the_effort_none_of_other_apis() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    off = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
    request = parsed(Api.MESSAGES, {**body, **off})
    assert {name: written(request, MESSAGES)[name] for name in off} == off
    assert written(request, CHAT)["reasoning_effort"] == written(request, RESPONSES)["reasoning"]["effort"] == "none"


def test_a_response_keeps_the_fields_of_its_own_api() -> None:
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"}
    own = {"text": text, "reasoning": {"effort": "low", "summary": "auto"}, "store": True, "metadata": {"a": "b"}}
    request = parsed(Api.RESPONSES, {"input": "hi", **own, "include": ["reasoning.encrypted_content"]})
    sent = written(request, RESPONSES)
    assert {name: sent[name] for name in own} == own and "include" not in sent


def test_tools_are_as_strict_as_in_the_clients_api() -> None:
    tool = {"name": "look", "parameters": {}}
    request = chat(tools=[{"type": "function", "function": tool}])
    assert written(request, RESPONSES)["tools"][0]["strict"] is False  # there, absence would mean true
    strict = chat(tools=[{"type": "function", "function": {**tool, "strict": True}}])
    assert [written(strict, kind)["tools"][0].get("strict") for kind in (RESPONSES, MESSAGES)] == [True, True]
    assert written(request, MESSAGES)["tools"][0]["input_schema"] == {"type": "object", "properties": {}}


def test_system_messages_are_one_field_of_messages() -> None:
    request = chat(messages=[{"role": "system", "content": text} for text in "ab"] + [{"role": "user", "content": "c"}])
    sent = written(request, MESSAGES)
    assert sent["system"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert sent["messages"] == [{"role": "user", "content": "c"}]
    named = replace(request, messages=(Message(Role.SYSTEM, "a", name=INSTRUCTIONS), request.messages[-1]))
    assert written(named, MESSAGES)["system"] == "a"


def test_answers_of_reasoning_only_are_left_out_where_they_are_refused() -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    request = chat(messages=[{"role": "user", "content": "a"}, thought, {"role": "user", "content": "b"}])
    assert [message["content"] for message in written(request, MESSAGES)["messages"]] == ["a", "b"]


def test_openai_itself_gets_the_limit_of_tokens_that_all_its_models_take() -> None:
    assert written(chat(max_tokens=5), CHAT)["max_tokens"] == 5
    own = written(chat(max_tokens=5), CHAT, "https://api.openai.com/v1")
    assert own["max_completion_tokens"] == 5 and "max_tokens" not in own


def test_the_sampling_of_the_session_is_sent() -> None:
    sampling = chat().sampling._replace(temperature=0.25, max_tokens=8)
    sent = upstream_body(chat(), sampling, Upstream("https://judge.test/v1", CHAT, "m", None, 60.0))
    assert (sent["temperature"], sent["max_tokens"]) == (0.25, 8)


def test_images_are_read_once_from_the_store_and_a_lost_one_is_named() -> None:
    asked = []

    async def read(digests: Any) -> Any:
        asked.append(list(digests))
        return [PICTURE]

    part = {"type": "image_url", "image_url": ImagePart(PICTURE.digest, detail="low")}
    body = {"messages": [{"role": "user", "content": [part, part]}]}
    found = asyncio.run(with_images(body, {}, read))
    assert found["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}} for _ in range(2)
    ]
    assert asked == [[PICTURE.digest]]
    with pytest.raises(InvalidRequest, match="is not stored; send it again"):
        asyncio.run(with_images(body, {}, no_images))
