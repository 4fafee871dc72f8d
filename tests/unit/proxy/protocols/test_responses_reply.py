"""Replies of the responses API are complete, valid for the SDK, and are recognised when a client replays them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from proxy.protocols.responses.response_object import text_logprobs
from proxy.rendering.deltas import TokenLogprob
from proxy.types import Message, Role
from tests.unit.proxy.protocols.response_bodies import (
    PROTOCOL,
    WEATHER,
    assistant,
    check_events,
    committed,
    deltas_of,
    request,
    streamed,
)
from tokengrove.reasons import FinishReason

KEYS = {
    *("id", "object", "created_at", "completed_at", "status", "background", "error", "incomplete_details", "output"),
    *("instructions", "max_output_tokens", "max_tool_calls", "model", "parallel_tool_calls", "previous_response_id"),
    *("reasoning", "store", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation"),
    *("presence_penalty", "frequency_penalty", "service_tier", "safety_identifier", "prompt_cache_key", "user"),
    *("metadata", "usage"),
}
CALL = ("call_1", "weather", '{"city": "Rome"}')
FULL = assistant("wait", CALL, ("call_2", "weather", "{}"), reasoning="hm")
ENCRYPTED = {"include": ["reasoning.encrypted_content"]}
WORDS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
CALLS = st.lists(st.tuples(st.uuids().map(lambda u: f"call_{u.hex}"), st.just("weather"), WORDS), max_size=3)


def reply(output: Message, finish: FinishReason = FinishReason.STOP, **fields: Any) -> dict[str, Any]:
    return PROTOCOL.reply(request(**fields), [committed(output, finish=finish)])


def kinds(body: dict[str, Any]) -> list[str]:
    return [item["type"] for item in body["output"]]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER, {"type": "web_search"}], "tool_choice": {"type": "function", "name": "weather"}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"}},
        {"reasoning": {"effort": "low", "summary": None}, "metadata": {"a": "b"}, "user": "u", "store": False},
        {**ENCRYPTED, "instructions": "be kind", "max_output_tokens": 5, "previous_response_id": "resp_1"},
    ],
)
def test_a_reply_is_valid_for_the_sdk_and_has_every_key(fields: dict[str, Any]) -> None:
    body = reply(FULL, **fields)
    parsed = Response.model_validate(body)
    assert set(body) == KEYS
    assert parsed.output_text == "wait"
    for name, value in fields.items():
        if name not in ("include", "tools", "reasoning", "text"):
            assert body[name] == value
    assert [tool["name"] for tool in body["tools"]] == ["weather"] * ("tools" in fields)


def test_item_ids_contain_the_interaction_id_and_the_kind_of_item() -> None:
    body = reply(FULL)
    hex_id = body["id"].removeprefix("resp_")
    assert [item["id"] for item in body["output"]] == [
        f"rs_{hex_id}",
        f"msg_{hex_id}",
        f"fc_{hex_id}_0",
        f"fc_{hex_id}_1",
    ]
    assert [item["call_id"] for item in body["output"][2:]] == ["call_1", "call_2"]


def test_usage_and_times_and_sampling_are_those_of_the_interaction() -> None:
    body = reply(FULL)
    assert body["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 5,
    }
    assert (body["created_at"], body["completed_at"], body["temperature"]) == (1000, 1001, 0.5)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(FinishReason.LENGTH, "max_output_tokens"), (FinishReason.CONTENT_FILTER, "content_filter")],
)
def test_a_cut_reply_is_incomplete_and_so_is_its_last_item(finish: FinishReason, reason: str) -> None:
    body = reply(FULL, finish)
    assert (body["status"], body["incomplete_details"], body["completed_at"]) == (
        "incomplete",
        {"reason": reason},
        None,
    )
    assert [item["status"] for item in body["output"]] == ["completed", "completed", "completed", "incomplete"]
    Response.model_validate(body)


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.STOP_STRING, FinishReason.TOOL_CALLS])
def test_any_other_finish_reason_gives_the_status_completed(finish: FinishReason) -> None:
    assert (reply(FULL, finish)["status"], reply(FULL, finish)["incomplete_details"]) == ("completed", None)


def test_there_is_a_message_item_if_there_is_text_or_no_other_item() -> None:
    assert kinds(reply(assistant())) == ["message"]
    assert kinds(reply(assistant(reasoning="hm"))) == ["reasoning"]
    assert kinds(reply(assistant("", CALL))) == ["function_call"]
    assert kinds(reply(FULL)) == ["reasoning", "message", "function_call", "function_call"]


def test_encrypted_content_is_sent_only_if_requested() -> None:
    assert "encrypted_content" not in reply(FULL)["output"][0]
    assert reply(FULL, **ENCRYPTED)["output"][0]["encrypted_content"]


def test_a_call_of_a_function_in_a_namespace_names_it() -> None:
    tools = [{"type": "namespace", "name": "mcp", "description": "", "tools": [WEATHER]}]
    assert reply(assistant("", CALL), tools=tools)["output"][0]["namespace"] == "mcp"
    assert "namespace" not in reply(assistant("", CALL), tools=[WEATHER])["output"][0]


def token(text: str) -> TokenLogprob:
    utf8 = text.encode()
    return TokenLogprob(text, utf8, -0.5, (TokenLogprob(text, utf8, -0.5), TokenLogprob("x", b"x", -1.0)))


def test_logprobs_are_those_of_the_text() -> None:
    tokens = (token("\n"), token("wa"), token("it"), token("<tool_call>"), token("{}"))
    turn = request(include=["message.output_text.logprobs"], top_logprobs=2)
    body = PROTOCOL.reply(turn, [committed(FULL, logprobs=tokens)])
    logprobs = body["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["wa", "it"]
    assert logprobs[0]["top_logprobs"][1] == {"token": "x", "logprob": -1.0, "bytes": [120]}
    Response.model_validate(body)


def test_logprobs_of_a_text_that_is_not_found_are_all_of_them() -> None:
    tokens = (token("\ufffd"), token("b"))
    assert text_logprobs(tokens, "ab") == tokens
    assert text_logprobs(tokens, "") == ()


def strip(items: list[dict[str, Any]], without: str) -> list[dict[str, Any]]:
    """Return items as clients replay them: unchanged, without ids, with the reasoning elsewhere, or only encrypted."""
    if without == "ids":
        return [{key: value for key, value in item.items() if key != "id"} for item in items]
    if without == "reasoning":
        return [{**item, "summary": []} if item["type"] == "reasoning" else item for item in items]
    if without == "summary":
        return [_as_content(item) if item["type"] == "reasoning" else item for item in items]
    return items


def _as_content(item: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": part["text"]} for part in item["summary"]]
    return {**item, "summary": [], "content": content}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_stands_once_in_a_reply(stream: bool) -> None:
    answer = committed(FULL)
    turn = request(**ENCRYPTED)
    body = check_events(streamed(turn, answer)) if stream else PROTOCOL.reply(turn, [answer])
    item = body["output"][0]
    assert (item["summary"], item["content"]) == ([{"type": "summary_text", "text": "hm"}], [])


@given(WORDS, CALLS, WORDS, st.sampled_from(["nothing", "ids", "reasoning", "summary"]), st.booleans())
def test_a_replayed_reply_parses_to_its_original_message(
    text: str, calls: list[tuple[str, str, str]], reasoning: str, without: str, stream: bool
) -> None:
    answer = committed(assistant(text, *calls, reasoning=reasoning or None))
    turn = request(**ENCRYPTED)
    body = check_events(streamed(turn, answer)) if stream else PROTOCOL.reply(turn, [answer])
    user = {"role": "user", "content": "hi"}
    messages = request(input=[user, *strip(body["output"], without), user]).messages
    assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT, Role.USER]
    origin = None if without == "ids" and not reasoning else answer.interaction.id
    assert messages[1] == assistant(text, *calls, reasoning=reasoning or None, origin=origin)


@given(WORDS, CALLS, WORDS, st.integers(1, 5), st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_the_stream_ends_in_the_unary_reply_under_every_chunking(
    text: str, calls: list[tuple[str, str, str]], reasoning: str, size: int, finish: FinishReason
) -> None:
    answer = committed(assistant(text, *calls, reasoning=reasoning or None), finish=finish)
    turn = request(**ENCRYPTED)
    final = check_events(streamed(turn, answer, deltas_of(answer.interaction.output, size)))
    assert final == PROTOCOL.reply(turn, [answer])
