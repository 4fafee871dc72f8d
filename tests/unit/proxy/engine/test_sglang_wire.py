"""SGLang's requests, and its replies in all their forms; inconsistent replies fail."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import CollectedReply
from proxy.engine.grammar import Grammar, GrammarPart, structural_tag
from proxy.engine.requests import GenerateRequest
from proxy.engine.sglang.engine import tensors_of
from proxy.engine.sglang.wire import SglangReply, sampling_params
from proxy.engine.streams import Streams
from proxy.engine.version_names import VersionNumbers
from proxy.prompt_ids import PromptIds
from proxy.types import SamplingParams, ids_of
from tokengrove.errors import EngineBusy, EngineFailed, InvalidRequest
from tokengrove.reasons import FinishReason


def part(ids: list[int], total: int, finish: Any = None, spans: Any = None, **meta: Any) -> dict[str, Any]:
    told = [[-0.5 * token, token, None] for token in ids]
    facts = {"completion_tokens": total, "finish_reason": finish, "weight_version": "0", "output_token_logprobs": told}
    return {"output_ids": ids, "meta_info": {**facts, **({"weight_versions": spans} if spans else {}), **meta}}


def chunks(*parts: Any, incremental: bool = False) -> list[TokenChunk]:
    answer = SglangReply(VersionNumbers(believed=set(range(9))), 1, incremental=incremental)
    return [chunk for one in parts for chunk in answer.read([one])]


@pytest.mark.parametrize("incremental", [True, False])
def test_tokens_keep_their_logprob_and_version_however_parts_and_spans_are_cut(incremental: bool) -> None:
    rng = random.Random(1)
    for _ in range(200):
        total = rng.randint(1, 30)
        ids, cut = [rng.randrange(600) for _ in range(total)], sorted(rng.sample(range(total + 1), min(3, total)))
        bounds = [0, *cut, total]
        versions = [number for number, (a, b) in enumerate(itertools.pairwise(bounds)) for _ in range(a, b)]
        parts, sent = [], 0
        while sent < total:
            end = rng.randint(sent, total)
            spans = [
                {"version": str(number), "start": a, "end": min(b, end) if rng.random() < 0.5 else b}
                for number, (a, b) in enumerate(itertools.pairwise(bounds))
                if a < end
            ]
            parts.append(part(ids[sent:end] if incremental else ids[:end], end, spans=spans))
            sent = end
        parts.append(part([] if incremental else ids, total, {"type": "length"}))
        for together in (1, rng.randint(2, 5), len(parts)):
            answer, reply = (
                SglangReply(VersionNumbers(believed=set(range(9))), 1, incremental=incremental),
                CollectedReply(),
            )
            for start in range(0, len(parts), together):
                for chunk in answer.read(parts[start : start + together]):
                    reply.add(chunk)
            assert reply.ids == ids and reply.versions == versions and reply.finish is FinishReason.LENGTH
            assert reply.logprobs == [-0.5 * token for token in ids]


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("last", [[], [9], [9, 8, 7, 6]])
def test_the_last_part_corrects_the_versions_of_earlier_parts(incremental: bool, last: list[int]) -> None:
    ids = [1, 2, 3, 4, 5, *last]
    spans = [{"version": "0", "start": 0, "end": 4}, {"version": "1", "start": 4, "end": len(ids)}]
    given = [
        part(ids[2 * incremental * bool(start) : end], end, weight_version=version)
        for start, end, version in ((0, 2, "0"), (2, 5, "1"))
    ]
    given.append(part(last if incremental else ids, len(ids), {"type": "abort"}, spans, weight_version="1"))
    got = chunks(*given, incremental=incremental)
    assert [chunk.corrected for chunk in got[:-1]] == [()] * (len(got) - 1)
    assert got[-1].corrected == ((4, 0), (1, 1))
    reply = CollectedReply()
    for chunk in got:
        reply.add(chunk)
    assert reply.ids == ids and reply.versions == [0] * 4 + [1] * (1 + len(last))


def labelled(
    *parts: Any, believed: tuple[int, ...] = (0, 1), sent: int = 0, serving: tuple[int, ...] = (), newest: int = 0
) -> tuple[list[int], int]:
    """The version of each token, and how many of them are uncertain at the end.

    `serving`: what the server has at each part, if known; `newest`: what it has had before.
    """
    answer, reply, unsure = SglangReply(VersionNumbers(believed=set(believed)), 1, version=sent), CollectedReply(), 0
    for one, now in itertools.zip_longest(parts, serving):
        newest = max(newest, now or 0)
        for chunk in answer.read([one], now, newest if serving else None):
            reply.add(chunk)
            unsure += chunk.unsure
    return reply.versions, unsure


STOP = {"type": "stop", "matched": 1}


@pytest.mark.parametrize("name", ["999", "2", "nonsense", 999, 10**30, 2**31, ["0"]])
def test_a_version_that_nobody_published_labels_no_token(name: Any) -> None:
    spans = [{"version": name, "start": 0, "end": 2}]
    assert labelled(part([1, 2], 2, STOP, weight_version=name)) == ([0, 0], 2)
    assert labelled(part([1, 2], 2, STOP, weight_version=name), sent=1) == ([1, 1], 2)
    assert labelled(part([1, 2], 2, STOP, spans, weight_version=name), sent=1) == ([1, 1], 2)


def test_tokens_after_a_version_that_nobody_published_are_certain_again() -> None:
    told = [part([1], 1), part([1, 2], 2, weight_version="999"), part([1, 2, 3], 3, STOP, weight_version="0")]
    assert labelled(*told) == ([0, 0, 0], 1)


def test_an_older_version_is_named_as_it_is_and_uncertain_if_nobody_published_it() -> None:
    assert labelled(part([1], 1, STOP, weight_version="3"), believed=(0, 5), sent=5) == ([3], 1)


def test_without_spans_the_part_in_which_the_weights_changed_keeps_the_older_version() -> None:
    told = [part([1, 2], 2), part([1, 2, 3, 4], 4, weight_version="1")]
    assert labelled(*told, part([1, 2, 3, 4, 5], 5, STOP, weight_version="1")) == ([0, 0, 0, 0, 1], 2)
    assert labelled(part([1, 2], 2, STOP, weight_version="1")) == ([0, 0], 2)  # in one piece
    assert labelled(part([1, 2], 2, STOP, weight_version="1"), sent=1) == ([1, 1], 0)


def test_a_version_that_another_server_has_is_not_believed_before_it_is_loaded() -> None:
    told, spans = {"weight_version": "999"}, [{"version": "999", "start": 0, "end": 1}]
    assert labelled(part([1], 1, STOP, **told), believed=(0, 999), serving=(0,)) == ([0], 1)
    assert labelled(part([1], 1, STOP, spans, **told), believed=(0, 999), serving=(0,)) == ([0], 1)
    assert labelled(part([1], 1, STOP, spans, **told), believed=(0, 999), serving=(999,)) == ([999], 0)


def test_a_version_is_believed_after_the_server_went_back_to_an_older_one() -> None:
    spans = [{"version": "2", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]
    told = part([1, 2, 3], 3, STOP, spans, weight_version="1")
    assert labelled(told, believed=(0, 1, 2), serving=(1,), newest=2) == ([2, 2, 1], 0)


def test_unnamed_tokens_that_come_after_new_weights_are_uncertain() -> None:
    told = [part([1], 1, weight_version=None), part([1, 2], 2, STOP, weight_version=None)]
    assert labelled(*told, serving=(0, 0)) == ([0, 0], 0)
    assert labelled(*told, serving=(0, 1)) == ([0, 0], 1)
    assert labelled(*told, serving=(1, 1)) == ([0, 0], 2)
    assert labelled(*told, sent=1, serving=(1, 0)) == ([1, 0], 1)


def test_spans_settle_what_was_uncertain() -> None:
    spans = [{"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 4}]
    told: list[Any] = [part([1, 2], 2), part([1, 2, 3, 4], 4, weight_version="1")]
    assert labelled(*told, part([1, 2, 3, 4], 4, STOP, spans)) == ([0, 0, 0, 1], 0)


def test_correct_versions_are_not_corrected() -> None:
    spans = [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]
    first, last = part([1, 2], 2, weight_version="0"), part([1, 2, 3], 3, {"type": "length"}, spans)
    assert [chunk.corrected for chunk in chunks(first, last)] == [(), ()]


def test_a_list_that_grows_while_it_is_read_repeats_no_token() -> None:
    shared = [5, 6]
    first = part(shared, 2)
    shared += [7]
    assert [list(c.ids) for c in chunks(first, part(shared, 3, {"type": "stop", "matched": 7}))] == [[5, 6], [7]]


def test_only_the_first_part_counts_the_cached_tokens_of_the_prompt() -> None:
    """After a retraction SGLang counts the reply's own tokens as cached too."""
    told = chunks(part([1], 1, cached_tokens=4), part([1, 2], 2, {"type": "length"}, cached_tokens=9))
    assert [chunk.cached_tokens for chunk in told] == [4, None]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ({"type": "stop", "matched": 2}, FinishReason.STOP),
        ({"type": "length", "length": 1}, FinishReason.LENGTH),
        ({"type": "abort", "message": "x"}, FinishReason.ABORT),
        ("length", FinishReason.LENGTH),
    ],
)
def test_finish_reasons(reason: Any, finish: FinishReason) -> None:
    assert chunks(part([3], 1, reason))[-1].finish is finish


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (part([1, 2], 3), EngineFailed),
        (part([1, 2], 1) | {"output_ids": []}, EngineFailed),
        (part([1], 1, output_token_logprobs=[[-1.0, 2, None]]), EngineFailed),
        (part([1], 1, output_token_logprobs=[[None, 1, None]]), EngineFailed),
        (part([1], 1, output_token_logprobs=[[-1.0]]), EngineFailed),
        (part([1], 1, output_token_logprobs=[{"logprob": -1.0}]), EngineFailed),
        (part([1], 1, output_token_logprobs=[-1.0]), EngineFailed),
        (part([2**31], 1), EngineFailed),
        (part([1, 2], 2, spans=[{"version": "0", "start": 0, "end": 1}]), EngineFailed),
        (part([1, 2], 2, spans=[{"version": "0", "start": 1, "end": 2}]), EngineFailed),
        (part([1], "one"), EngineFailed),
        (part([1], 1, "length", output_top_logprobs=[[7]]), EngineFailed),
        (part([1], 1, {"kind": "stop"}), EngineFailed),
        (part([1], 1, spans=[{"start": 0}]), EngineFailed),
        (part([1], 1, prompt_tokens=2), EngineFailed),
        ({"text": "hello"}, EngineFailed),
        ([], EngineFailed),
        ({"error": {"message": "too long"}}, InvalidRequest),
        (part([], 0, {"type": "abort", "status_code": 400, "message": "no"}), InvalidRequest),
        (part([], 0, {"type": "abort", "status_code": 500, "message": "no"}), EngineFailed),
    ],
)
def test_inconsistent_or_refused_replies_fail(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        chunks(wrong)


@pytest.mark.parametrize(
    "parts",
    [
        (part([1, 2, 3], 3), part([1, 3, 4, 5], 4)),
        (part([1, 2, 3], 3), part([1, 2, 2, 3, 4], 5)),
        (part([1, 2, 3], 3), part([1, 2], 2)),
        (part([1, 2, 3], 3), part([1, 9, 3, 4], 4, "length")),
        (part([1, 2, 3], 3), part([9, 2, 3], 3, "length")),
    ],
)
def test_a_cumulative_part_must_begin_with_the_tokens_of_earlier_parts(parts: Any) -> None:
    with pytest.raises(EngineFailed, match="changed tokens"):
        chunks(*parts)


def test_an_incremental_part_with_other_than_its_new_tokens_fails() -> None:
    with pytest.raises(EngineFailed, match="2 ids and 1 logprobs for 1 tokens"):
        chunks(part([1], 1), part([1, 2], 2, output_token_logprobs=[[-1.0, 2, None]]), incremental=True)


def test_an_abort_that_repeats_the_last_token_gives_it_once() -> None:
    """SGLang joins what a slow reader has yet to read with the part of the abort, which has the last id again."""
    lists = [[-0.5 * token, token, None] for token in (1, 2, 3)]
    joined = part([2, 3, 3], 3, {"type": "abort"}, output_token_logprobs=[*lists[1:], *lists])
    got = chunks(part([1], 1), joined, incremental=True)
    assert [list(chunk.ids) for chunk in got] == [[1], [2, 3]] and got[-1].finish is FinishReason.ABORT


def test_version_names_are_numbered_in_order_and_integers_stay() -> None:
    numbers = VersionNumbers()
    assert [numbers.number(name) for name in ("default", "step-b", "17", 3, "default")] == [0, 1, 17, 3, 0]


def tag(*alternatives: Any, **options: Any) -> Any:
    return json.loads(structural_tag(Grammar(tuple(alternatives), **options)))["format"]


def test_grammars_as_structural_tags() -> None:
    text, token = GrammarPart(text="a"), GrammarPart(token_id=7)
    schema = GrammarPart(schema={"type": "object"})
    said = {"type": "const_string", "value": "a"}
    assert tag((text,)) == said
    both = tag((text, token), (schema,))
    assert both["type"] == "or" and both["elements"][0]["elements"] == [said, {"type": "token", "token": 7}]
    assert both["elements"][1]["json_schema"] == {"type": "object"}
    patterns = tag((GrammarPart(regex="a+"),), (GrammarPart(ebnf='root ::= "a"'),))["elements"]
    assert patterns == [{"type": "regex", "pattern": "a+"}, {"type": "grammar", "grammar": 'root ::= "a"'}]
    again = tag((text,), repeat=True, separator=",")
    star = {"type": "star", "content": {"type": "sequence", "elements": [{"type": "const_string", "value": ","}, said]}}
    assert again == {"type": "sequence", "elements": [said, star]}


def test_default_parameters_are_not_sent() -> None:
    request = GenerateRequest("r", PromptIds(ids_of([1])), SamplingParams(temperature=0.5, max_tokens=4, seed=3), (2,))
    params = sampling_params(request, None)
    assert params["sampling_seed"] == 3 and params["ignore_eos"] is False and params["stop_token_ids"] == [2]
    assert not {"stream_interval", "presence_penalty", "logit_bias", "structural_tag"} & set(params)
    assert sampling_params(request, 8)["stream_interval"] == 8


def test_a_minimum_length_is_sent_if_there_is_an_end_token_to_keep_back() -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=4)
    request = GenerateRequest("r", PromptIds(ids_of([1])), sampling, (2,))
    assert sampling_params(request, None)["min_new_tokens"] == 4
    for without in (replace(request, stop_token_ids=()), replace(request, sampling=SamplingParams(max_tokens=9))):
        assert "min_new_tokens" not in sampling_params(without, None)


@pytest.mark.parametrize(
    "wrong", [{}, {"serialized_named_tensors": "AAAA"}, {"serialized_named_tensors": ["no base64"]}]
)
def test_tensors_that_are_not_a_list_of_base64_are_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        tensors_of(wrong)
    assert raised.value.param == "serialized_named_tensors"
    assert tensors_of({"serialized_named_tensors": ["AAEC", b"raw"]}) == [b"\x00\x01\x02", b"raw"]


def test_a_version_beyond_int32_is_numbered_like_a_name() -> None:
    numbers = VersionNumbers()
    assert [numbers.number(name) for name in ("20261121120000", str(2**31 - 1), str(2**31), "20261121120000")] == [
        0,
        2**31 - 1,
        1,
        0,
    ]
    assert numbers.number("9" * 5000) == 2


@pytest.mark.parametrize(
    ("status", "kind"), [(400, InvalidRequest), (429, EngineBusy), (500, EngineFailed), (503, EngineBusy)]
)
def test_an_error_in_a_stream_is_of_the_class_of_its_status(status: int, kind: type[Exception]) -> None:
    reason = {"type": "abort", "status_code": status, "message": "no"}
    for told in (part([], 0, reason), {"error": {"message": "no", "code": status}}):
        with pytest.raises(kind, match="no") as raised:
            chunks(told)
        assert type(raised.value) is kind


@pytest.mark.parametrize(("running", "tokens"), [(1, 1), (63, 1), (64, 2), (127, 2), (128, 3), (512, 3), (4096, 3)])
def test_many_streams_get_more_tokens_in_a_part(running: int, tokens: int) -> None:
    streamed = GenerateRequest("r", PromptIds(ids_of([1])), SamplingParams(max_tokens=4))
    assert Streams(running=running).interval(streamed) == tokens
    assert Streams(given=5, running=running).interval(streamed) == 5
    for setting in (None, 5):
        assert Streams(setting, running).interval(replace(streamed, whole=True)) == 32


def test_parts_that_come_together_make_one_chunk_per_version_and_correct_what_was_said_before() -> None:
    answer = SglangReply(VersionNumbers(believed=set(range(9))), 1, incremental=True)
    (first,) = answer.read([part([1], 1, cached_tokens=4), part([2], 2)])
    assert (list(first.ids), first.version, first.cached_tokens, first.finish) == ([1, 2], 0, 4, None)
    spans = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 4}]
    told = [part([3], 3, weight_version="1"), part([4], 4, {"type": "length"}, spans, weight_version="1")]
    (last,) = answer.read(told)
    assert (list(last.ids), last.version, last.finish) == ([3, 4], 1, FinishReason.LENGTH)
    assert last.corrected == ((1, 0), (1, 1)) and answer.finish is FinishReason.LENGTH
    assert answer.read([]) == []
