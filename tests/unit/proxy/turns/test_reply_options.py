"""What a request asks of its reply is kept, and gives a request for the same reply."""

from __future__ import annotations

from dataclasses import fields, replace

from proxy.turns.reply_options import reply_options_of, request_of
from proxy.types import INSTRUCTIONS, Api, Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, TurnRequest
from tests.interactions import interaction

# Stored in columns of their own, or without influence on a reply.
ELSEWHERE = {
    *("api", "model", "messages", "tools", "sampling", "template_options", "dropped", "idempotency_key"),
    *("request_id", "further_prompts", "prompt_number", "score_prompt", "prompt_logprobs"),
    *("state_hash", "purpose", "agent", "input_ids", "text", "images", "files"),
    *("given", "retry", "response_format", "prefill", "timeline", "sender", "route", "pinned", "reasoning_fields"),
    *("thread", "outside"),
}
ASK = (Message(Role.SYSTEM, "Be brief.", name=INSTRUCTIONS), Message(Role.USER, "one"))
TOOLS = (Tool("f"),)


def asking(**more: object) -> TurnRequest:
    return TurnRequest(Api.RESPONSES, "m", ASK, TOOLS, **more)  # type: ignore[arg-type]


def again(request: TurnRequest) -> TurnRequest:
    turn = replace(interaction("a"), api=request.api, model=request.model, asked=reply_options_of(request))
    return request_of(turn, request.messages, request.tools)


def test_a_request_at_its_defaults_keeps_nothing() -> None:
    assert reply_options_of(asking()) == {}


def test_what_shapes_a_reply_comes_back() -> None:
    request = asking(
        **{"stream": True, "logprobs": True, "top_logprobs": 2, "n": 3, "parallel_tool_calls": False},
        **{"previous_id": "resp_1", "return_token_ids": True, "per_token": True, "names_ids": True},
        tool_choice=ToolChoice(ToolChoiceMode.NAMED, "f"),
        echo={"metadata": {"a": "b"}, "instructions": "Be brief.", "include": []},
    )
    assert again(request) == request


def test_other_instructions_than_the_first_message_are_kept_as_text() -> None:
    request = asking(echo={"instructions": "Be long."})
    assert reply_options_of(request)["echo"] == {"instructions": "Be long."}
    assert again(request) == request


def test_the_beginning_of_an_answer_comes_back_from_the_answer() -> None:
    prefill = Message(Role.ASSISTANT, "It is", reasoning="hm")
    answer = prefill._replace(content="It is so.", tool_calls=(ToolCall("c", "f", "{}"),))
    turn = replace(interaction("a"), output=answer, prefill=len("It is"))
    assert request_of(turn, ASK, TOOLS).prefill == prefill


def test_every_field_of_a_request_is_kept_or_stored_elsewhere() -> None:
    given = {
        spec.name: getattr(asking(), spec.name)
        for spec in fields(TurnRequest)
        if spec.name not in ("tool_choice", "echo")
    }
    kept = {name for name in given.keys() - ELSEWHERE if name in reply_options_of(asking(**{name: "other"}))}
    assert given.keys() - ELSEWHERE == kept
