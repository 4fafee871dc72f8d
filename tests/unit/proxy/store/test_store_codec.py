"""Decoding returns the encoded value, and encodings have the documented size."""

from __future__ import annotations

import dataclasses
import string
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.store.sql import codec, rows
from proxy.store.sql.tables import interactions, sessions
from proxy.types import (
    Api,
    ImagePart,
    Interaction,
    Lineage,
    Message,
    PlacedImage,
    Role,
    Sampler,
    SamplingParams,
    SessionRecord,
    Thread,
    Tool,
    ToolCall,
    ids_of,
)
from tokengrove.errors import InvalidRequest
from tokengrove.options.model import RouteKind
from tokengrove.options.session import Credit, Outcome, SessionStatus
from tokengrove.reasons import Echo, Evidence, FinishReason, LogprobsOf, Reason, Segment, Status

any_text = st.text(st.characters(exclude_categories=()), max_size=20)
plain_text = st.text(max_size=20).filter(lambda text: "\0" not in text)
finite = st.floats(allow_nan=False, allow_infinity=False)
lineages = st.builds(
    Lineage, st.lists(plain_text, max_size=2).map(tuple), st.sampled_from(Segment), st.sampled_from(Evidence)
)
samplers = st.builds(Sampler, plain_text, plain_text, plain_text)
scalars = st.none() | st.booleans() | st.integers() | finite | any_text
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4), max_leaves=12
)
objects = st.dictionaries(any_text, json_values, max_size=3)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(ids_of)
times = st.floats(0, 2e9)
names = st.none() | plain_text
pairs = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=3).map(tuple)
tool_calls = st.lists(st.builds(ToolCall, any_text, any_text, any_text), max_size=2).map(tuple)
numbers, details = st.integers(0, 2**40), st.sampled_from(["", "low", "high"])
images = st.builds(ImagePart, plain_text, numbers, numbers, numbers, details)
placed_images = st.builds(PlacedImage, plain_text, numbers, numbers, numbers, numbers, details)
messages = st.builds(
    Message, st.sampled_from(Role), any_text, tool_calls, st.none() | any_text, st.none() | any_text,
    st.none() | any_text, st.lists(images, max_size=2).map(tuple), st.none(),
)  # fmt: skip
tools = st.builds(Tool, any_text, any_text, objects, st.none() | st.booleans())
samplings = st.builds(
    SamplingParams, temperature=finite, top_p=finite, top_k=st.integers(-1, 50), min_p=finite,
    max_tokens=st.none() | st.integers(1, 9),
    presence_penalty=finite, frequency_penalty=finite, repetition_penalty=finite, ignore_eos=st.booleans(),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), finite), max_size=2).map(tuple),
    seed=st.none() | st.integers(0, 2**70), stop=st.lists(any_text, max_size=2).map(tuple),
)  # fmt: skip


def float32s(least: int = 0, most: int = 9) -> st.SearchStrategy[array[float]]:
    values = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return st.lists(values, min_size=least, max_size=most).map(lambda floats: array("f", floats))


@st.composite
def interactions_of_any_kind(draw: st.DrawFn) -> Interaction:
    output_ids = ids_of(draw(st.lists(st.integers(0, 2**31 - 1), max_size=9)))
    cut = draw(st.integers(0, len(output_ids)))
    runs = tuple((count, draw(st.integers(0, 2**40))) for count in (cut, len(output_ids) - cut) if count)
    return Interaction(
        id=draw(plain_text),
        session_id=draw(plain_text),
        parent_id=draw(names),
        aligned=draw(st.booleans()),
        reason=draw(st.sampled_from(Reason)),
        api=draw(st.sampled_from(Api)),
        status=draw(st.sampled_from(Status)),
        new_messages=tuple(draw(st.lists(messages, max_size=3))),
        output=draw(messages),
        prefix_length=draw(st.integers(0, 10**6)),
        prompt_suffix=draw(token_ids),
        output_ids=output_ids,
        logprobs=draw(float32s(len(output_ids), len(output_ids))),
        versions=runs,
        finish_reason=draw(st.none() | st.sampled_from(FinishReason)),
        sampling=draw(samplings),
        tools=tuple(draw(st.lists(tools, max_size=2))),
        template_options=draw(objects),
        seq=draw(st.integers(0, 10**6)),
        model=draw(plain_text),
        stop_string=draw(names),
        reward=draw(st.none() | finite),
        rewards=draw(st.dictionaries(any_text, finite, max_size=2)),
        token_rewards=draw(st.none() | float32s()),
        state_hash=draw(names),
        purpose=draw(names),
        agent=draw(names),
        trainable=draw(st.booleans()),
        spans=draw(pairs),
        images=tuple(draw(st.lists(placed_images, max_size=2))),
        request_hash=draw(plain_text),
        error=draw(names),
        dropped=tuple(draw(st.lists(any_text, max_size=2))),
        prefill=draw(st.integers(0, 9)),
        best_effort=draw(st.sampled_from([(), ("seed",)])),
        echo=tuple(draw(st.lists(st.sampled_from(Echo), max_size=2))),
        idempotency_key=draw(st.none() | any_text),
        request_id=draw(st.none() | any_text),
        grammar=draw(st.booleans()),
        has_logprobs=draw(st.booleans()),
        unmasked_logprobs=draw(st.none() | float32s(len(output_ids), len(output_ids))),
        malformed_calls=draw(st.integers(0, 10**6)),
        uncertain=draw(st.booleans()),
        logprobs_of=draw(st.sampled_from(LogprobsOf)),
        cached_tokens=draw(st.none() | st.integers(0, 10**6)),
        reasoning_tokens=draw(st.integers(0, 10**6)),
        created_at=draw(times),
        first_token_at=draw(st.none() | times),
        completed_at=draw(st.none() | times),
        route=draw(plain_text),
        external=draw(objects),
        samplers=tuple(draw(st.lists(st.tuples(st.integers(0, 2**20), samplers), max_size=3))),
        adapter=draw(st.none() | st.integers(0, 2**40)),
        thread=draw(st.none() | st.builds(Thread, plain_text, names)),
        lineage=draw(st.none() | lineages),
        route_kind=draw(st.sampled_from(RouteKind)),
    )


session_records = st.builds(
    SessionRecord, plain_text, plain_text, names, st.sampled_from(SessionStatus), names, names, names, names,
    objects, objects, objects, finite, st.sampled_from(Credit), st.none() | st.sampled_from(Outcome), names,
    st.none() | st.booleans(), objects, st.none() | st.integers(0, 2**40), times, times, st.none() | times,
    st.none() | times, st.booleans(), st.none() | st.integers(1, 1000),
)  # fmt: skip


@given(json_values)
def test_json_is_decoded_unchanged(value: Any) -> None:
    assert codec.decode_json(codec.encode_json(value), empty=value) == value


@given(json_values.map(lambda value: [value, "x" * codec.COMPRESS_ABOVE_BYTES]))
def test_long_json_is_compressed_and_decoded_unchanged(value: Any) -> None:
    data = codec.encode_json(value)
    assert data is not None and data[:1] in b"zZ"
    assert codec.decode_json(data) == value


def test_a_long_conversation_is_stored_in_less_than_half_its_text() -> None:
    words = [{"role": "tool", "content": f"line {n}: {string.ascii_letters}"} for n in range(200)]
    data = codec.encode_json(words)
    assert data is not None and len(data) < len(str(words)) / 2


@pytest.mark.parametrize("value", [None, [], (), {}])
def test_an_empty_value_is_null(value: Any) -> None:
    assert codec.encode_json(value) is None


@pytest.mark.parametrize("value", [0, False, ""])
def test_a_false_value_that_is_not_empty_is_kept(value: Any) -> None:
    assert codec.decode_json(codec.encode_json(value), empty="lost") == value


@pytest.mark.parametrize("value", [object(), [{1, 2}], {"a": b"bytes"}])
def test_values_that_json_cannot_store_are_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="cannot be stored as JSON"):
        codec.encode_json(value)


@given(token_ids)
def test_ids_are_stored_in_four_bytes_each_and_decoded_unchanged(ids: array[int]) -> None:
    assert codec.decode_ids(codec.encode_ids(ids)) == ids
    assert len(codec.encode_ids(ids)) == 4 * len(ids)


@given(st.lists(st.floats(width=32), max_size=40))
def test_logprobs_are_decoded_bit_for_bit(values: list[float]) -> None:
    floats = array("f", values)
    assert codec.decode_floats(codec.encode_floats(floats)).tobytes() == floats.tobytes()


def test_stored_ids_and_logprobs_are_little_endian() -> None:
    assert codec.encode_ids(ids_of([1])) == b"\x01\0\0\0"
    assert codec.encode_floats(array("f", [1.0])) == b"\0\0\x80\x3f"


def test_an_array_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        codec.encode_ids(array("q", [1]))


@given(interactions_of_any_kind())
@pytest.mark.wide
def test_an_interaction_comes_back_from_its_row(node: Interaction) -> None:
    assert rows.interaction_of(rows.interaction_row(node, node.seq)) == node  # type: ignore[arg-type]


@given(session_records)
def test_a_session_comes_back_from_its_row(record: SessionRecord) -> None:
    assert rows.session_of(rows.session_row(record)) == record  # type: ignore[arg-type]


def test_every_field_has_a_column() -> None:
    in_notes = {"dropped", "best_effort", "prefill", "echo", "idempotency_key", "request_id"}
    in_notes |= {
        "grammar",
        "has_logprobs",
        "malformed_calls",
        "uncertain",
        "logprobs_of",
        "replay",
        "route",
        "route_kind",
        "adapter",
        "external",
        "samplers",
        "thread",
        "lineage",
    }
    assert {field.name for field in dataclasses.fields(Interaction)} - in_notes <= set(interactions.c.keys())
    assert {field.name for field in dataclasses.fields(SessionRecord)} <= set(sessions.c.keys())


def test_a_sampled_token_costs_at_most_twelve_bytes(node: Any) -> None:
    length = 10_000
    long = node(
        output_ids=ids_of(range(length)), logprobs=array("f", [-1.0] * length), versions=((9_000, 1), (1_000, 2))
    )
    row = rows.interaction_row(long, 0)
    assert sum(len(row[name]) for name in ("output_ids", "logprobs", "versions")) <= 12 * length


def test_a_complete_interaction_of_unequal_lengths_is_refused(node: Any) -> None:
    with pytest.raises(InvalidRequest, match="2 output ids, 1 logprobs"):
        rows.interaction_row(node(logprobs=array("f", [-1.0])), 0)
    with pytest.raises(InvalidRequest, match="2 output ids and 1 unmasked logprobs"):
        rows.interaction_row(node(unmasked_logprobs=array("f", [-1.0])), 0)


def test_a_failed_interaction_of_unequal_lengths_is_kept(node: Any) -> None:
    failed = node(logprobs=array("f", [-1.0]), status=Status.FAILED, seq=0)
    assert rows.interaction_of(rows.interaction_row(failed, 0)) == failed  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["nul \0", "half \ud800"])
def test_text_that_a_text_column_cannot_hold_is_refused(text: str, node: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rows.interaction_row(node(model=text), 0)
    assert caught.value.param == "model"


def test_an_error_text_is_always_stored(node: Any) -> None:
    assert rows.interaction_row(node(error="nul \0 half \ud800 é"), 0)["error"] == "nul \\x00 half \\ud800 é"
