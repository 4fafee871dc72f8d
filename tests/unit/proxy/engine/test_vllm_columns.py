"""Side columns of vLLM servers: found out at start, asked for by request, and missing where a reply lacks them."""

from __future__ import annotations

import base64
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import request_for
from proxy.engine.interface import PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.same_model import OwnModel, own_model
from proxy.engine.servers.vllm_columns import ReplyColumns, read_experts
from proxy.engine.servers.vllm_server import VllmServer
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, ColumnRequest
from proxy.side_columns.kept_sets import kept_rows
from proxy.side_columns.rows import SideColumn, SideRows, joined
from proxy.types import Logprobs, ids_of
from tests.engines.engine_process import pool_of
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import VllmWire, experts_at, mask_of, npy, serving_wire
from tokengrove.errors import EngineFailed, InvalidRequest
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

PROMPT = ids_of(range(40, 60))
ALL = frozenset({Replay.KEPT, Replay.EXPERTS})
TOPS = Replay.TOP_LOGPROBS


@contextlib.asynccontextmanager
async def vllm(own: OwnModel | None = None, **wire_is: Any) -> AsyncIterator[tuple[VllmServer, VllmWire]]:
    async with serving_wire("vllm") as (url, wire):
        for name, value in wire_is.items():
            setattr(wire, name, value)
        engine = VllmServer(url, VOCABULARY, own=own)
        try:
            await engine.start()
            yield engine, wire
        finally:
            await engine.close()


def wanting(*replay: Replay, start: int = 0, tokens: int = 8, max_kept: int = 512, **sampling: Any) -> GenerateRequest:
    request = request_for(PROMPT, tokens)
    given = {"top_k": 5, **sampling}
    columns = ColumnRequest(frozenset(replay), max_kept, start)
    return replace(request, sampling=request.sampling._replace(**given), columns=columns)


async def sampled(engine: VllmServer, request: GenerateRequest) -> list[TokenChunk]:
    chunks: list[TokenChunk] = []
    await engine.sample(request, chunks.append)
    assert [token for chunk in chunks for token in chunk.ids] == following(PROMPT, request.sampling.max_tokens or 0)
    return chunks


def columns_of(chunks: list[TokenChunk], name: str) -> list[SideColumn]:
    return [chunk.columns[name] for chunk in chunks if chunk.columns is not None and name in chunk.columns]


def whole(chunks: list[TokenChunk], name: str) -> SideColumn:
    """The rows of all chunks, which must follow one another."""
    found = columns_of(chunks, name)
    assert [column.end for column in found[:-1]] == [column.start for column in found[1:]]
    return SideColumn(found[0].start, joined([column.rows for column in found]))


def sets(rows: SideRows) -> list[list[int]]:
    return [row.tolist() for row in rows.sets()]


@pytest.mark.parametrize(
    ("server", "records"),
    [
        ({}, set()),
        ({"masks": True}, {Replay.KEPT}),
        ({"experts": True}, {Replay.EXPERTS}),
        ({"masks": True, "experts": True}, {Replay.KEPT, Replay.EXPERTS}),
    ],
)
async def test_the_columns_that_a_server_records_are_those_of_a_streamed_reply(
    server: dict[str, Any], records: set[Replay]
) -> None:
    flags = {Replay.KEPT: "--return-sampling-mask", Replay.EXPERTS: "--enable-return-routed-experts"}
    async with vllm(**server) as (engine, wire):
        info = engine.info()
        assert info.records == records | {TOPS} and not wire.asked
        for column, flag in flags.items():
            why = info.why_unrecorded([column])
            assert (why is None) == (column in records)
            if why is not None:
                assert f"start it with {flag}" in why[1] and engine.url in why[1]


async def test_a_server_that_does_not_stream_its_columns_records_none_and_the_version_that_does_is_named() -> None:
    async with vllm(masks=True, experts=True, streams=False, release="0.31.0") as (engine, _):
        info = engine.info()
        assert info.records == {TOPS}
        assert "vLLM 0.31.0 does not stream them; use vLLM 0.32 or later" in dict(info.unrecorded)[Replay.KEPT]
        assert "use vLLM 0.24 or later" in dict(info.unrecorded)[Replay.EXPERTS]


async def test_without_the_endpoint_for_ids_its_flag_is_named_too() -> None:
    async with vllm(masks=True, scale_out=False) as (engine, _):
        assert engine.info().records == {TOPS}
        assert "--enable-scale-out --return-sampling-mask" in dict(engine.info().unrecorded)[Replay.KEPT]


@pytest.mark.parametrize(
    ("release", "records"),
    [
        ("0.32.0", ALL),
        ("0.33.1.dev3+g0", ALL),
        ("1.0", ALL),
        ("0.31.9", {Replay.EXPERTS}),
        ("0.23.0", set()),
        ("", set()),
    ],
)
async def test_a_paused_server_is_judged_by_its_configuration_and_its_version(
    release: str, records: set[Replay]
) -> None:
    async with serving_wire("vllm") as (url, wire):
        wire.masks = wire.experts = True
        wire.release = release
        await wire.engine.pause(PauseMode.IN_PLACE)
        engine = VllmServer(url, VOCABULARY)
        await engine.start()
        assert engine.info().records == records | {TOPS}
        await engine.close()


@pytest.mark.parametrize("moe", [True, None, False])
async def test_a_server_that_says_that_its_model_has_no_experts_is_dense(moe: bool | None) -> None:
    async with vllm(moe=moe) as (engine, _):
        assert engine.info().dense is (moe is False)


@pytest.mark.parametrize(
    ("config", "dense"),
    [
        ('{"model_type": "qwen3"}', True),
        ('{"model_type": "qwen3_moe", "num_experts": 8}', False),
        ('{"model_type": "any", "text_config": {"n_routed_experts": 8}}', False),
        ('{"model_type": "any", "ffn_config": {"moe_top_k": 2}}', False),
        ('{"model_type": "any", "num_local_experts": 0}', True),
        ("{}", False),
        ("[]", False),
    ],
)
async def test_the_config_of_the_proxys_model_says_whether_it_is_dense(tmp_path: Any, config: str, dense: bool) -> None:
    (tmp_path / "config.json").write_text(config)
    own = own_model("--model it", lambda text: ids_of(map(ord, text)), tmp_path)
    assert own.dense is dense
    async with vllm(own) as (engine, _):
        assert engine.info().dense is dense


async def test_masks_are_kept_sets_with_the_positions_of_their_tokens() -> None:
    async with vllm(masks=True, experts=True) as (engine, _):
        chunks = await sampled(engine, wanting(Replay.KEPT))
        kept, logprobs = whole(chunks, KEPT), whole(chunks, KEPT_LOGPROBS)
        assert kept.start == logprobs.start == len(PROMPT) and not columns_of(chunks, EXPERTS)
        assert sets(kept.rows) == [sorted(mask_of(token)) for token in following(PROMPT, 8)]
        assert logprobs.rows.values.tolist() == [value for chunk in chunks for value in chunk.logprobs]


async def test_kept_sets_above_the_limit_are_missing() -> None:
    async with vllm(masks=True) as (engine, _):
        kept = whole(await sampled(engine, wanting(Replay.KEPT, max_kept=2)), KEPT)
        assert len(kept.rows) == 8 and kept.rows.missing.all()


@pytest.mark.parametrize(
    ("mode", "exact"),
    [("processed_logprobs", True), ("raw_logprobs", False)],
)
async def test_the_logprobs_after_truncation_are_those_of_processed_logprobs_only(mode: str, exact: bool) -> None:
    async with vllm(masks=True, mode=mode) as (engine, _):
        chunks = await sampled(engine, wanting(Replay.KEPT))
        assert bool(columns_of(chunks, KEPT_LOGPROBS)) is exact and columns_of(chunks, KEPT)


async def test_experts_are_those_from_the_first_position_that_was_asked_for() -> None:
    async with vllm(experts=True, masks=True) as (engine, wire):
        chunks = await sampled(engine, wanting(Replay.EXPERTS, start=13))
        (column,) = columns_of(chunks, EXPERTS)
        assert column.start == 13 and column.end == len(PROMPT) + 8 - 1
        assert column.rows.values.dtype == np.uint8
        assert column.rows.values.tolist() == [experts_at(position) for position in range(13, column.end)]
        assert not columns_of(chunks, KEPT) and not columns_of(chunks, KEPT_LOGPROBS)
        assert wire.bodies[0]["sampling_params"]["routed_experts_prompt_start"] == 13


async def test_a_start_behind_the_prompt_is_its_last_token() -> None:
    async with vllm(experts=True) as (engine, wire):
        chunks = await sampled(engine, wanting(Replay.EXPERTS, start=len(PROMPT) + 3))
        assert wire.bodies[0]["sampling_params"]["routed_experts_prompt_start"] == len(PROMPT) - 1
        assert whole(chunks, EXPERTS).start == len(PROMPT) - 1


async def test_a_request_without_columns_gets_none_and_as_few_rows_as_possible_are_sent() -> None:
    async with vllm(experts=True, masks=True) as (engine, wire):
        request = replace(wanting(), columns=None)
        assert not any(chunk.columns for chunk in await sampled(engine, request))
        assert wire.bodies[0]["sampling_params"]["routed_experts_prompt_start"] == len(PROMPT) - 1
    async with vllm() as (engine, wire):
        await sampled(engine, request)
        assert "routed_experts_prompt_start" not in wire.bodies[0]["sampling_params"]


async def test_a_row_for_the_last_token_is_accepted_and_other_rows_are_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with vllm(experts=True) as (engine, wire):
        wire.spare = 1
        assert whole(await sampled(engine, wanting(Replay.EXPERTS)), EXPERTS).end == len(PROMPT) + 8
        for spare in (2, -1):
            wire.spare = spare
            assert not columns_of(await sampled(engine, wanting(Replay.EXPERTS)), EXPERTS)
    assert [reason for _, reason in lacking(caplog)] == ["a reply has more or fewer rows than tokens"]


def lacking(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [record.args for record in caplog.records if record.msg == "replies of an engine server lack rows"]
    return [(args["column"], args["reason"]) for args in found if isinstance(args, dict)]


async def test_what_a_reply_lacks_is_missing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with vllm(experts=True, masks=True, loses=("sampling_mask", "routed_experts")) as (engine, _):
        for _ in range(2):
            chunks = await sampled(engine, wanting(*ALL))
            assert not columns_of(chunks, KEPT) and not columns_of(chunks, EXPERTS)
            assert len(whole(chunks, KEPT_LOGPROBS).rows) == 8
    assert lacking(caplog) == [
        (KEPT, "a reply has no sampling mask"),
        (EXPERTS, "a reply has no routed experts"),
    ]


async def test_without_top_k_no_mask_is_missing_silently_and_no_top_k_is_added(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with vllm() as (engine, wire):  # a vLLM that takes such requests, but returns no mask
        chunks = await sampled(engine, wanting(Replay.KEPT, top_k=0, top_p=0.9))
        assert not columns_of(chunks, KEPT)
        assert wire.bodies[0]["sampling_params"]["top_k"] == 0
    assert lacking(caplog) == [(KEPT, "a reply has no sampling mask: its request has no top_k")]


@pytest.mark.parametrize(
    ("sampling", "field"), [({"top_k": 0}, "top_k"), ({"temperature": 0.0}, "temperature"), ({"top_k": -1}, "top_k")]
)
async def test_a_request_that_vllm_refuses_because_it_returns_masks_is_told_what_to_send(
    sampling: dict[str, Any], field: str
) -> None:
    async with vllm(masks=True) as (engine, _):
        with pytest.raises(InvalidRequest, match="--return-sampling-mask") as raised:
            await engine.sample(wanting(Replay.KEPT, **sampling), lambda _: None)
        assert raised.value.param == field


async def test_a_server_that_returns_masks_joins_a_pool_which_records_what_all_servers_do() -> None:
    async with serving_wire("vllm") as (first, one), serving_wire("vllm") as (second, other):
        one.masks = one.experts = other.experts = True
        one.moe = False
        async with pool_of(first) as pool:
            assert pool.info().records == ALL | {TOPS} and pool.info().dense
        async with pool_of(first, second) as pool:
            assert pool.info().records == {Replay.EXPERTS, TOPS} and not pool.info().dense
            column, why = pool.info().unrecorded[0]
            assert column is Replay.KEPT and second in why


@pytest.mark.parametrize("aborts", [True, False])
async def test_a_reply_that_is_ended_early_still_gets_its_experts_if_the_server_can_end_it(
    aborts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_wire("vllm", 0.005) as (url, wire):
        wire.experts = True
        engine = VllmServer(url, VOCABULARY)
        await engine.start()
        if not aborts:
            engine._facts = replace(engine._facts, paths=frozenset())
        chunks: list[TokenChunk] = []

        def take(chunk: TokenChunk) -> FinishReason | None:
            chunks.append(chunk)
            return FinishReason.STOP_STRING if sum(len(each.ids) for each in chunks) >= 4 else None

        request = replace(wanting(Replay.EXPERTS, tokens=500), whole=False)
        assert await engine.sample(request, take) is FinishReason.STOP_STRING
        tokens = sum(len(each.ids) for each in chunks)
        assert 4 <= tokens < 500
        if aborts:
            column = whole(chunks, EXPERTS)
            assert column.start == 0 and column.end >= len(PROMPT) + tokens - 1
            assert column.rows.values[-1].tolist() == experts_at(column.end - 1)
            assert not lacking(caplog)
        else:
            assert not columns_of(chunks, EXPERTS)
            assert lacking(caplog) == [(EXPERTS, "a reply was ended before its last part, which has the rows")]
        await engine.close()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", ">u2"])
def test_experts_are_read_in_each_dtype_of_vllm(dtype: str) -> None:
    values = np.arange(24).reshape(4, 3, 2)
    read = read_experts(npy(values.astype(dtype)))
    assert read.tolist() == values.tolist() and read.dtype.kind == "u" and read.dtype.isnative
    turned = read_experts(npy(np.asfortranarray(values.astype(dtype))))
    assert turned.tolist() == values.tolist()


def test_an_expert_that_would_mark_a_missing_row_is_read_as_itself() -> None:
    rows = SideRows(read_experts(npy(np.full((2, 1, 1), 255, np.uint8))))
    assert rows.values.tolist() == [[[255]], [[255]]] and not rows.missing.any()
    assert not SideRows(read_experts(npy(np.zeros((0, 3, 2), np.uint8)))).missing.any()


def cut(text: str, count: int) -> str:
    return base64.b64encode(base64.b64decode(text)[:-count]).decode()


WHOLE = npy(np.zeros((4, 3, 2), np.uint8))


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "no base64!", "AAAA", 5, ["AAAA"], {"data": "AAAA"}),
        *(cut(WHOLE, 1), cut(WHOLE, 100), base64.b64encode(base64.b64decode(WHOLE) + b"x").decode()),
        *(npy(np.zeros((4, 6), np.uint8)), npy(np.zeros(24, np.uint8)), npy(np.zeros((4, 0, 2), np.uint8))),
        *(
            npy(np.zeros((4, 3, 2), np.float32)),
            npy(np.zeros((4, 3, 2), np.int64)),
            npy(np.full((4, 3, 2), -1, np.int32)),
        ),
        *(npy(np.array([[[None]]], object)), npy(np.zeros((4, 3, 2), "S1"))),
    ],
)
def test_other_experts_fail_the_reply(wrong: Any) -> None:
    with pytest.raises(EngineFailed, match="the engine gave"):
        read_experts(wrong)


def test_a_header_of_many_rows_without_their_bytes_allocates_nothing() -> None:
    huge = base64.b64decode(WHOLE).replace(b"(4, 3, 2), }  ", b"(10**9,3,2), }")
    assert len(huge) == len(base64.b64decode(WHOLE))
    for header in (huge, base64.b64decode(WHOLE).replace(b"(4, 3, 2), }       ", b"(4000000000, 3, 2)}")):
        with pytest.raises(EngineFailed, match="the engine gave"):
            read_experts(base64.b64encode(header).decode())


def reply_columns(*replay: Replay) -> ReplyColumns:
    return ReplyColumns(ColumnRequest(frozenset(replay)), 100, 3, exact=True, start=0)


@pytest.mark.parametrize(
    ("masks", "what"),
    [
        ([[1, "2"]], "no list of token ids"),
        ([[1.0, 2.0]], "no list of token ids"),
        ([[]], "no list of token ids"),
        ([5], "no list of token ids"),
        ([None], "no list of token ids"),
        ([[[1]]], "no list of token ids"),
        ([[1, 100]], "token 100, but the model's token ids are 0 to 99"),
        ([[1, -1]], "token -1"),
        ([[2, 3]], "sampled token 1, which its sampling mask does not have"),
    ],
)
def test_a_mask_of_another_form_fails_the_reply(masks: Any, what: str) -> None:
    with pytest.raises(EngineFailed, match=what):
        reply_columns(Replay.KEPT).add({"sampling_mask": masks}, [1], 1)


def test_masks_of_more_or_fewer_tokens_are_missing_for_their_part_only() -> None:
    columns = reply_columns(Replay.KEPT)
    columns.add({"sampling_mask": [[1, 2]]}, [1], 1)
    columns.add({"sampling_mask": [[3, 4]]}, [3, 5], 3)
    columns.add({"sampling_mask": [[7], [8, 9]]}, [7, 8], 5)
    found = columns.taken(Logprobs("f", [-0.1] * 5), 5)
    assert found is not None and found[KEPT].start == 3
    expected = kept_rows([[1, 2], None, None, [7], [8, 9]], 100, 512)
    assert found[KEPT].rows.counts is not None and expected.counts is not None
    assert found[KEPT].rows.counts.tolist() == expected.counts.tolist()
    assert sets(found[KEPT].rows) == sets(expected)
