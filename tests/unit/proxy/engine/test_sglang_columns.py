"""Side columns of SGLang's replies: their rows and positions in all forms of a reply, and rows that are none."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import request_for
from proxy.engine.expert_layers import ExpertLayers
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.sglang import engine
from proxy.engine.sglang.facts import recorded_by, unrecorded_by
from proxy.engine.sglang.replay import ReplayPlan, expert_rows, replay_plan
from proxy.engine.sglang.wire import SglangReply
from proxy.engine.version_names import VersionNumbers
from proxy.settings import Settings
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, ColumnRequest
from proxy.side_columns.kept_sets import ALL
from proxy.side_columns.rows import SideColumn, spread
from proxy.types import ids_of
from tests.engines.scripts import VOCABULARY
from tests.engines.wire import experts_of, kept_logprob, kept_with
from tests.wide import first
from tokengrove.errors import EngineFailed
from tokengrove.options.start import Replay

PROMPT = list(range(40, 60))
LAYERS = ExpertLayers(3, (0, 1, 2), 2, 8)
STOP = {"type": "length", "length": 1}
BOTH = frozenset({Replay.KEPT, Replay.EXPERTS})


def plan_of(start: int = 0, max_kept: int = 512, **changes: Any) -> ReplayPlan:
    columns = ColumnRequest(BOTH, max_kept, start)
    return replace(ReplayPlan(columns, VOCABULARY, masks=True, whole=False, layers=LAYERS), **changes)


def encoded(rows: Any) -> str:
    return base64.b64encode(np.array(rows, "<i4").tobytes()).decode()


def part_of(ids: list[int], sent: int, total: int, *, incremental: bool, last: bool, **meta: Any) -> dict[str, Any]:
    span = slice(sent if incremental else 0, total)
    told = {
        "completion_tokens": total,
        "finish_reason": STOP if last else None,
        "output_token_logprobs": [[-0.5, token, None] for token in ids[span]],
        "output_token_sampling_mask": [kept_with(token) for token in ids[span]],
        "output_token_sampling_logprobs": [kept_logprob(token) for token in ids[span]],
        "output_token_sampling_mask_length": total,
        **meta,
    }
    return {"output_ids": ids[span], "meta_info": {name: value for name, value in told.items() if value is not None}}


def reply_of(plan: ReplayPlan, *, incremental: bool = False) -> SglangReply:
    return SglangReply(VersionNumbers(), len(PROMPT), incremental, plan=plan)


def column_of(chunks: list[TokenChunk], name: str) -> list[SideColumn]:
    return [chunk.columns[name] for chunk in chunks if chunk.columns is not None and name in chunk.columns]


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("seed", first(range(20)))
def test_rows_keep_their_positions_however_parts_are_cut(seed: int, incremental: bool) -> None:
    rng = random.Random(seed)
    total, start = rng.randint(1, 30), rng.randrange(len(PROMPT))
    ids = [rng.randrange(VOCABULARY) for _ in range(total)]
    whole = [*PROMPT, *ids]
    rows = [experts_of(place, whole[place], 3) for place in range(start, len(whole) - 1)]
    cuts = [*sorted(rng.sample(range(1, total), rng.randint(0, total - 1))), total]
    length = {} if rng.random() < 0.5 else {"output_token_sampling_mask_length": None}
    parts = [
        part_of(ids, sent, end, incremental=incremental, last=end == total, **length)
        for sent, end in zip([0, *cuts], cuts, strict=False)
    ]
    parts[-1]["meta_info"]["routed_experts"] = encoded(rows)
    reply, chunks, together = reply_of(plan_of(start), incremental=incremental), [], rng.randint(1, 4)
    for number in range(0, len(parts), together):
        chunks += reply.read(parts[number : number + together])
    kept = spread(column_of(chunks, KEPT), len(PROMPT), len(whole))
    assert [each.tolist() for each in kept.sets()] == [sorted(kept_with(token)) for token in ids]
    logprobs = spread(column_of(chunks, KEPT_LOGPROBS), len(PROMPT), len(whole))
    assert logprobs.values.tolist() == [kept_logprob(token) for token in ids]
    [experts] = column_of(chunks, EXPERTS)
    assert experts.start == start and experts.rows.values.tolist() == rows
    assert experts.rows.values.dtype == np.uint8


def test_a_list_that_grows_while_it_is_read_gives_each_token_its_own_set() -> None:
    ids = [1, 2, 3, 4]
    one = part_of(ids, 0, 2, incremental=False, last=False)
    two = part_of(ids, 2, 4, incremental=False, last=True)
    one["meta_info"]["output_token_sampling_mask"] = two["meta_info"]["output_token_sampling_mask"]
    one["meta_info"]["output_token_sampling_logprobs"] = two["meta_info"]["output_token_sampling_logprobs"]
    reply = reply_of(plan_of())
    found = column_of([*reply.read([one]), *reply.read([two])], KEPT)
    assert [(column.start, len(column.rows)) for column in found] == [(20, 2), (22, 2)]
    assert [each.tolist() for column in found for each in column.rows.sets()] == [sorted(kept_with(t)) for t in ids]


@pytest.mark.parametrize("absent", ["output_token_sampling_mask", "routed_experts"])
def test_a_reply_without_rows_has_missing_rows_and_does_not_fail(absent: str) -> None:
    part = part_of([1, 2], 0, 2, incremental=False, last=True, routed_experts=encoded(np.zeros((0, 3, 2))))
    del part["meta_info"][absent]
    [chunk] = reply_of(plan_of(21)).read([part])
    assert chunk.ids.tolist() == [1, 2]
    assert absent == "routed_experts" or chunk.columns is None


def test_a_part_without_sets_between_others_is_the_only_one_with_missing_rows() -> None:
    ids = [1, 2, 3]
    parts = [part_of(ids, sent, sent + 1, incremental=True, last=sent == 2) for sent in range(3)]
    del parts[1]["meta_info"]["output_token_sampling_mask"]
    [chunk] = reply_of(plan_of(), incremental=True).read(parts)
    assert chunk.columns is not None and chunk.columns[KEPT].rows.missing.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"output_token_sampling_mask": [[1, 2], [1, 3]]}, "token 2 a kept set without that token"),
        ({"output_token_sampling_mask": [[1], [2, 10**6]]}, "token 1000000, which the model lacks"),
        ({"output_token_sampling_mask": [[1], [2, -1]]}, "token -1, which the model lacks"),
        ({"output_token_sampling_mask": 7}, "form"),
        ({"output_token_sampling_logprobs": [0.5, -1.0]}, "above 0"),
        ({"routed_experts": encoded([1, 2, 3, 4, 5])}, "5 expert ids, which are no rows of 3 layers with 2 experts"),
        ({"routed_experts": encoded(np.zeros(6 * 40))}, "240 expert ids, more than those of tokens 0 to 20"),
        ({"routed_experts": "not base64!"}, "no base64 of int32"),
        ({"routed_experts": base64.b64encode(b"123").decode()}, "no base64 of int32"),
        ({"routed_experts": [1, 2]}, "no base64 of int32"),
    ],
)
def test_rows_that_contradict_the_reply_or_the_model_fail_it(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineFailed, match=said):
        reply_of(plan_of()).read([part_of([1, 2], 0, 2, incremental=False, last=True, **wrong)])


def test_a_set_above_the_limit_is_missing_and_its_logprob_stays() -> None:
    [chunk] = reply_of(plan_of(max_kept=2)).read([part_of([1, 7], 0, 2, incremental=False, last=True)])
    assert chunk.columns is not None
    assert len(kept_with(1)) == 4 and chunk.columns[KEPT].rows.missing.all()
    assert chunk.columns[KEPT_LOGPROBS].rows.values.tolist() == [kept_logprob(1), kept_logprob(7)]


def test_without_truncation_every_set_is_the_whole_vocabulary() -> None:
    part = part_of([1, 2], 0, 2, incremental=False, last=True)
    [chunk] = reply_of(plan_of(masks=False, whole=True, layers=None)).read([part])
    assert chunk.columns is not None and chunk.columns[KEPT].rows.counts is not None
    assert chunk.columns[KEPT].rows.counts.tolist() == [ALL, ALL]
    assert chunk.columns[KEPT_LOGPROBS].rows.values.tolist() == [-0.5, -0.5]


ROWS = np.array([experts_of(place, place, 3) for place in range(10)])


@pytest.mark.parametrize(
    "told", [ROWS[4:9], ROWS[4:10], ROWS[:9], ROWS[:10]], ids=["N-1", "N", "N-1 from the start", "N from the start"]
)
def test_rows_are_those_of_the_tokens_that_a_pass_took_in(told: Any) -> None:
    column = expert_rows(told.astype("<i4").ravel(), LAYERS, 4, 9)
    assert column is not None and column.start == 4
    assert column.rows.values.tolist() == ROWS[4:9].tolist()


def test_too_few_rows_cannot_be_placed_and_are_missing() -> None:
    assert expert_rows(ROWS[4:7].astype("<i4").ravel(), LAYERS, 4, 9) is None


@pytest.mark.parametrize("wrong", [0, -1, 8])
def test_a_row_that_no_router_gives_is_missing_and_not_zero(wrong: int) -> None:
    rows = ROWS.copy()
    rows[2, 1] = [wrong, wrong] if wrong == 0 else [wrong, 1]
    column = expert_rows(rows[:9].astype("<i4").ravel(), LAYERS, 0, 9)
    assert column is not None
    assert np.flatnonzero(column.rows.missing).tolist() == [2]
    assert (column.rows.values[2] == np.iinfo(np.uint8).max).all()


def test_layers_without_experts_have_no_rows() -> None:
    with_dense = np.concatenate([np.zeros((9, 1, 2), np.int64), ROWS[:9]], axis=1)
    column = expert_rows(with_dense.astype("<i4").ravel(), ExpertLayers(4, (1, 2, 3), 2, 8), 0, 9)
    assert column is not None and column.rows.values.tolist() == ROWS[:9].tolist()


@pytest.mark.parametrize(("largest", "dtype"), [(254, np.uint8), (255, np.uint16), (300, np.uint16)])
def test_experts_have_the_smallest_dtype_that_also_holds_a_missing_row(largest: int, dtype: Any) -> None:
    column = expert_rows(np.array([0, largest], "<i4"), ExpertLayers(1, (0,), 2, 512), 0, 1)
    assert column is not None and column.rows.values.dtype == dtype and not column.rows.missing.any()


@pytest.mark.parametrize(("at", "missing"), [(1, []), (2, []), (4, [20, 21]), (6, [20, 21, 22, 23])])
def test_rows_that_a_retraction_has_computed_again_are_missing(at: int, missing: list[int]) -> None:
    ids = list(range(1, 7))
    whole = [*PROMPT, *ids]
    rows = [experts_of(place, whole[place], 3) for place in range(len(whole) - 1)]
    reply, chunks = reply_of(plan_of()), []
    for total in range(1, 7):
        last = {"routed_experts": encoded(rows)} if total == 6 else {}
        told = part_of(ids, total - 1, total, incremental=False, last=total == 6, num_retractions=int(total >= at))
        told["meta_info"] |= last
        chunks += reply.read([told])
    [experts] = column_of(chunks, EXPERTS)
    assert np.flatnonzero(experts.rows.missing).tolist() == missing


def grammar() -> Grammar:
    return Grammar(((GrammarPart("yes"),),))


ALL_RECORDED = frozenset(Replay)


def planned(
    asked: frozenset[Replay] = BOTH, *, under_grammar: bool = False, bans: bool = False, **sampling: Any
) -> Any:
    request = request_for(ids_of(PROMPT), 4)
    request = replace(
        request,
        sampling=request.sampling._replace(**sampling),
        columns=ColumnRequest(asked, 512, 7),
        grammar=grammar() if under_grammar else None,
    )
    facts = {"sampling_mask_max_tokens": 64}
    return replay_plan(request, ALL_RECORDED, LAYERS, facts, vocab_size=VOCABULARY, bans=bans)


@pytest.mark.parametrize(
    ("sampling", "masks", "whole"),
    [
        ({}, False, True),
        ({"top_k": 20}, True, False),
        ({"top_k": 64, "top_p": 0.9, "min_p": 0.1}, True, False),
        ({"top_k": 65}, False, False),
        ({"top_p": 0.9}, False, False),
        ({"min_p": 0.1}, False, False),
        ({"temperature": 0.0, "top_k": 20}, False, True),
        ({"min_tokens": 2}, False, False),
        ({"under_grammar": True}, False, False),
        ({"under_grammar": True, "top_k": 20}, True, False),
        ({"bans": True}, False, False),
    ],
)
def test_kept_sets_are_asked_of_requests_that_sglang_takes(sampling: Any, masks: bool, whole: bool) -> None:
    plan = planned(**sampling)
    assert (plan.masks, plan.whole) == (masks, whole)
    asked = {"return_routed_experts": True, "routed_experts_start_len": 7}
    assert plan.fields(len(PROMPT)) == ({"return_sampling_mask": True} if masks else {}) | asked


def test_only_the_columns_that_a_request_names_are_asked() -> None:
    assert planned(frozenset({Replay.KEPT}), top_k=5).fields(20) == {"return_sampling_mask": True}
    assert set(planned(frozenset({Replay.EXPERTS}), top_k=5).fields(20)) == {
        "return_routed_experts",
        "routed_experts_start_len",
    }
    assert planned(frozenset({Replay.TOP_LOGPROBS}), top_k=5) is None
    assert replay_plan(request_for(ids_of(PROMPT), 4), ALL_RECORDED, LAYERS, {}, vocab_size=9, bans=False) is None


WITH_EXPERTS = {"version": "0.5.23", "enable_return_routed_experts": True}


@pytest.mark.parametrize(
    ("facts", "kept", "experts"),
    [
        (WITH_EXPERTS, "", ""),
        ({**WITH_EXPERTS, "version": "0.5.16"}, "", ""),
        ({**WITH_EXPERTS, "version": "0.5.15.post1"}, "0.5.16 and later do", ""),
        ({**WITH_EXPERTS, "version": "0.5.11"}, "0.5.16 and later do", "0.5.12 and later"),
        ({**WITH_EXPERTS, "version": "0.0.0.dev1+g01"}, "", ""),
        ({"version": "0.5.23"}, "", "start it with its flag"),
        ({**WITH_EXPERTS, "speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE", ""),
        ({**WITH_EXPERTS, "speculative_algorithm": "DFLASH"}, "", ""),
        ({**WITH_EXPERTS, "sampling_backend": "ascend"}, "--sampling-backend ascend", ""),
    ],
)
def test_what_sglang_does_not_record_has_a_reason_and_a_way_out(facts: Any, kept: str, experts: str) -> None:
    unrecorded = unrecorded_by(facts, LAYERS, "start it with its flag")
    told = dict(unrecorded)
    assert set(told) == {name for name, why in ((Replay.KEPT, kept), (Replay.EXPERTS, experts)) if why}
    assert kept in told.get(Replay.KEPT, "") and experts in told.get(Replay.EXPERTS, "")
    assert recorded_by(unrecorded) == frozenset(Replay) - set(told)


def test_a_model_whose_layers_are_not_known_records_no_experts() -> None:
    assert "give --model" in dict(unrecorded_by(WITH_EXPERTS, None, ""))[Replay.EXPERTS]


@pytest.mark.parametrize(
    ("config", "replay", "given", "told"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 2}, ("experts",), (), True),
        ({"num_experts": 8, "num_experts_per_tok": 2}, ("experts",), ("enable_return_routed_experts=false",), False),
        ({"num_experts": 8, "num_experts_per_tok": 2}, ("kept",), (), None),
        ({}, ("experts",), (), None),
    ],
)
def test_sglang_inside_the_server_gets_its_flag_from_the_setting(
    config: Any, replay: Any, given: Any, told: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "m", "num_hidden_layers": 2, **config}))
    monkeypatch.setattr(engine, "option_names", lambda: frozenset({"enable_return_routed_experts"}))
    arguments = engine.sglang_arguments(Settings(replay=replay, engine_arg=given), tmp_path)
    assert arguments.get("enable_return_routed_experts") == told
