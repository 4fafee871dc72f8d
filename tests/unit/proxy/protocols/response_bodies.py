"""Helpers for the tests of the responses API: committed answers, their deltas, and a strict reader of event streams."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from proxy.protocols.responses.protocol import ResponsesProtocol
from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from proxy.types import Api, Interaction, Message, Role, SamplingParams, ToolCall, TurnRequest, ids_of
from tokengrove.reasons import FinishReason, Reason, Status

PROTOCOL = ResponsesProtocol()
TERMINAL = ("response.completed", "response.incomplete", "response.failed")
WEATHER = {"type": "function", "name": "weather", "description": "of a city", "parameters": {"type": "object"}}


def request(**fields: Any) -> TurnRequest:
    return PROTOCOL.parse({"model": "m", "input": "hi", **fields})


def assistant(
    text: str = "", *calls: tuple[str, str, str], reasoning: str | None = None, origin: str | None = None
) -> Message:
    return Message(
        Role.ASSISTANT, text, tool_calls=tuple(ToolCall(*c) for c in calls), reasoning=reasoning, origin=origin
    )


def committed(
    output: Message,
    *,
    finish: FinishReason = FinishReason.STOP,
    logprobs: tuple[TokenLogprob, ...] | None = None,
    name: str | None = None,
) -> Answer:
    """Return an answer as a turn passes it to the protocol."""
    return Answer(
        Interaction(
            id=name or "resp_" + uuid.uuid4().hex,
            session_id="s",
            parent_id=None,
            aligned=False,
            reason=Reason.FIRST,
            api=Api.RESPONSES,
            status=Status.COMPLETE,
            new_messages=(Message(Role.USER, "hi"),),
            output=output,
            prefix_length=0,
            prompt_suffix=ids_of([1, 2, 3]),
            output_ids=ids_of([4, 5]),
            logprobs=array("f", [-0.5, -0.5]),
            versions=((2, 0),),
            finish_reason=finish,
            sampling=SamplingParams(temperature=0.5),
            cached_tokens=1,
            reasoning_tokens=1,
            created_at=1000.4,
            completed_at=1001.6,
        ),
        logprobs,
    )


def pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def deltas_of(message: Message, size: int = 3) -> list[Delta]:
    """Return the deltas of a message, in pieces of `size` characters."""
    out: list[Delta] = [ReasoningDelta(piece) for piece in pieces(message.reasoning or "", size)]
    out += [TextDelta(piece) for piece in pieces(message.content, size)]
    for index, call in enumerate(message.tool_calls):
        out.append(ToolCallStart(index, call.id, call.name))
        out += [ToolCallArguments(index, piece) for piece in pieces(call.arguments, size)]
        out.append(ToolCallEnd(index))
    return out


def streamed(turn: TurnRequest, answer: Answer, deltas: Iterable[Delta] | None = None) -> bytes:
    """Return the whole stream of one reply."""
    interaction = answer.interaction
    encoder = PROTOCOL.stream(turn, interaction.id, int(interaction.created_at), interaction.prompt_tokens)
    out = encoder.start()
    for delta in deltas_of(interaction.output) if deltas is None else deltas:
        out += encoder.deltas([delta])
    return out + encoder.finish([answer])


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Decode a stream; checks that it ends with `[DONE]`, and that events are named like their type and numbered."""
    *blocks, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n", 1)
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def check_events(stream: bytes) -> dict[str, Any]:
    """Check every rule of the event order, and that events and final response agree. Returns the final response."""
    events = events_of(stream)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] in TERMINAL
    final = events[-1]["response"]
    for event in events[:2]:
        assert event["response"]["id"] == final["id"]
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    assert final["status"] == events[-1]["type"].removeprefix("response.")
    items = _items(events[2:-1])
    assert items == final["output"] if final["status"] != "failed" else items[: len(final["output"])] == final["output"]
    assert len({item["id"] for item in items}) == len(items)
    return dict(final)


def _items(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that the events build, in order; after a failure the last may be unfinished."""
    done: list[dict[str, Any]] = []
    at = 0
    while at < len(events):
        end = next((i for i in range(at, len(events)) if events[i]["type"] == "response.output_item.done"), len(events))
        group = events[at : end + 1]
        assert all(event["output_index"] == len(done) for event in group)
        if end == len(events):
            break
        _check_item(group)
        done.append(group[-1]["item"])
        at = end + 1
    return done


_DELTAS = {
    "reasoning": (
        "response.reasoning_summary_text.delta",
        ["response.reasoning_summary_text.done", "response.reasoning_summary_part.done"],
        ["response.reasoning_summary_part.added"],
    ),
    "function_call": ("response.function_call_arguments.delta", ["response.function_call_arguments.done"], []),
    "message": (
        "response.output_text.delta",
        ["response.output_text.done", "response.content_part.done"],
        ["response.content_part.added"],
    ),
}


def _check_item(group: Sequence[dict[str, Any]]) -> None:
    added, done = group[0]["item"], group[-1]["item"]
    assert group[0]["type"] == "response.output_item.added"
    assert added["status"] == "in_progress" and done["status"] in ("completed", "incomplete")
    assert (added["type"], added["id"], added.get("call_id")) == (done["type"], done["id"], done.get("call_id"))
    delta, ends, begins = _DELTAS[done["type"]]
    middle = [event["type"] for event in group[1:-1]]
    count = middle.count(delta)
    assert middle == [*begins, *[delta] * count, *ends]
    assert all(event["item_id"] == done["id"] for event in group[1:-1])
    text = "".join(event["delta"] for event in group if event["type"] == delta)
    if done["type"] == "function_call":
        assert added["arguments"] == "" and added["name"] == done["name"] == group[-2]["name"]
        assert text == group[-2]["arguments"] == done["arguments"]
        return
    assert added["content"] == []
    closing = next(event for event in group if event["type"] == ends[0])
    parts = (*done["content"], *done.get("summary", ()))
    assert text == closing["text"] == "".join(part["text"] for part in parts)
    if done["type"] == "message":
        assert group[-2]["part"] == done["content"][0]
        assert closing["logprobs"] == done["content"][0]["logprobs"]
