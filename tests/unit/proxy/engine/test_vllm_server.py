"""vLLM servers: what they can do is found out at start, pauses and updates are vLLM's, incomplete replies fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from proxy.engine.contract import complete, request_for
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import Capability, PauseMode, WeightTransfer
from proxy.engine.servers.connection import ServerConnection
from proxy.engine.servers.vllm_server import VllmServer
from proxy.engine.servers.vllm_wire import GENERATE, VllmReply, logprobs_of
from proxy.engine.version_names import VersionNumbers
from proxy.prompt_ids import PromptIds
from proxy.types import SamplingParams, ids_of
from tests.engines.gates import AdminGate
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import VllmWire, serving_wire
from tests.support import until
from tokengrove.errors import (
    EngineBusy,
    EngineFailed,
    EngineIncapable,
    EngineLost,
    EngineUnavailable,
    InvalidRequest,
    ProxyError,
    UnsupportedParameter,
)
from tokengrove.reasons import FinishReason, LogprobsOf

PROMPT = ids_of(range(40, 60))
SAMPLED, RULE, MODEL = LogprobsOf.SAMPLED, LogprobsOf.RULE, LogprobsOf.MODEL


@contextlib.asynccontextmanager
async def vllm(delay_s: float = 0.0, **wire_is: Any) -> AsyncIterator[tuple[VllmServer, VllmWire]]:
    async with serving_wire("vllm", delay_s) as (url, wire):
        for name, value in wire_is.items():
            setattr(wire, name, value)
        engine = VllmServer(url, VOCABULARY)
        try:
            await engine.start()
            yield engine, wire
        finally:
            await engine.close()


@pytest.mark.parametrize("scale_out", [True, False])
@pytest.mark.parametrize(
    ("mode", "sampling", "of"),
    [
        ("processed_logprobs", {"temperature": 0.7, "logit_bias": ((3, 1.0),)}, RULE),
        ("processed_logprobs", {"top_p": 0.5}, SAMPLED),
        ("raw_logprobs", {"top_p": 0.5}, RULE),
        ("raw_logprobs", {"temperature": 0.7}, MODEL),
    ],
)
async def test_the_mode_is_found_out_and_each_chunk_says_what_its_logprobs_are_of(
    scale_out: bool, mode: str, sampling: dict[str, Any], of: LogprobsOf
) -> None:
    async with vllm(mode=mode, scale_out=scale_out) as (engine, _):
        chunks = []
        request = request_for(PROMPT, 4)
        request = replace(request, sampling=request.sampling._replace(**sampling))
        await engine.sample(request, chunks.append)
        assert [token for chunk in chunks for token in chunk.ids] == following(PROMPT, 4)
        assert {chunk.logprobs_of for chunk in chunks} == {of}


@pytest.mark.parametrize(
    ("sampling", "processed", "raw"),
    [
        ({}, RULE, RULE),
        ({"temperature": 0.7}, RULE, MODEL),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, RULE, RULE),
        ({"top_p": 0.5}, SAMPLED, RULE),
        ({"top_k": 3}, SAMPLED, RULE),
        ({"min_p": 0.1}, SAMPLED, RULE),
        ({"top_k": 3, "temperature": 0.7}, SAMPLED, MODEL),
        ({"presence_penalty": 0.1}, RULE, MODEL),
        ({"frequency_penalty": 0.1}, RULE, MODEL),
        ({"repetition_penalty": 1.1}, RULE, MODEL),
        ({"repetition_penalty": 1.1, "temperature": 0.0}, RULE, MODEL),
        ({"logit_bias": ((3, 1.0),)}, RULE, MODEL),
        ({"min_tokens": 2}, RULE, MODEL),
    ],
)
def test_what_logprobs_are_of_follows_from_the_mode_and_the_request(
    sampling: dict[str, Any], processed: LogprobsOf, raw: LogprobsOf
) -> None:
    params = SamplingParams(**sampling)
    assert (logprobs_of(params, processed=True), logprobs_of(params, processed=False)) == (processed, raw)


@pytest.mark.parametrize("mode", ["processed_logits", "raw_logits"])
async def test_a_server_that_returns_logits_is_refused(mode: str) -> None:
    with pytest.raises(ProxyError, match="--logprobs-mode processed_logprobs"):
        async with vllm(mode=mode):
            pass


async def test_a_paused_server_is_not_sampled_to_find_its_mode_out() -> None:
    async with serving_wire("vllm") as (url, wire):
        await wire.engine.pause(PauseMode.IN_PLACE)
        wire.mode = "raw_logprobs"
        engine = VllmServer(url, VOCABULARY)
        await engine.start()
        assert await engine.rests() and not wire.asked
        assert any("processed_logprobs" in what for what in engine.missing)
        await engine.close()


@pytest.mark.parametrize("late", [EngineLost("it does not answer within 20 s"), EngineBusy("its queue is full")])
async def test_a_server_whose_first_token_is_late_is_lost_and_does_not_lack_the_endpoint(
    late: EngineLost, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ServerConnection.call

    async def call_late(self: ServerConnection, path: str, *arguments: Any, **options: Any) -> Any:
        if path == GENERATE:
            raise late
        return await call(self, path, *arguments, **options)

    async with serving_wire("vllm") as (url, _):
        engine = VllmServer(url, VOCABULARY)
        monkeypatch.setattr(ServerConnection, "call", call_late)
        with pytest.raises(type(late)):
            await engine.start()
        monkeypatch.setattr(ServerConnection, "call", call)
        await engine.start()
        assert engine.missing == []
        await engine.close()


async def test_what_a_server_lacks_is_named_with_the_flag() -> None:
    async with vllm() as (engine, _):
        assert engine.missing == []
        assert {Capability.GRAMMAR, Capability.UPDATE_WEIGHTS, Capability.DETERMINISTIC} <= engine.info().capabilities
        assert (engine.info().max_running_requests, engine.world_size) == (16, 2)
    async with vllm(scale_out=False, controls=False, mode="raw_logprobs") as (engine, _):
        scale_out, dev_mode, mode, lora = engine.missing
        assert "--enable-scale-out" in scale_out and "DEV_MODE" in dev_mode and "--logprobs-mode" in mode
        assert "--lora-target-modules" in lora
        lost = {Capability.GRAMMAR, Capability.UPDATE_WEIGHTS, Capability.RELEASE_MEMORY, Capability.DETERMINISTIC}
        assert not lost & engine.info().capabilities
        with pytest.raises(EngineIncapable, match="DEV_MODE"):
            await engine.update_weights("/weights/1")
        with pytest.raises(EngineIncapable, match="DEV_MODE"):
            await engine.flush_cache()
        with pytest.raises(EngineIncapable, match="sleep"):
            await engine.release_memory()
        with pytest.raises(UnsupportedParameter, match="--enable-scale-out"):
            await complete(engine, replace(request_for(PROMPT, 4), grammar=GRAMMAR))


GRAMMAR = Grammar(((GrammarPart("yes"),),))


async def test_a_server_that_does_not_list_its_endpoints_is_asked_for_them() -> None:
    async with vllm(takes_parts=None) as (engine, _):
        assert engine.missing == []


async def test_a_request_has_every_field_in_vllms_words() -> None:
    async with vllm() as (engine, wire):
        request = request_for(PROMPT, 9)
        sampling = SamplingParams(
            **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 9, "seed": 5, "min_tokens": 2},
            **{"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
            logit_bias=((3, 1.0),),
        )
        request = replace(request, sampling=sampling, stop_token_ids=(7,), grammar=GRAMMAR, session_id="one")
        await complete(engine, request)
        (body,) = wire.bodies
        params = body["sampling_params"]
        assert body["reasoning_ended"] is True and "yes" in params.pop("structured_outputs")["structural_tag"]
        assert params == {
            **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "max_tokens": 9, "seed": 5, "min_tokens": 2},
            **{"presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"3": 1.0}},
            **{"stop_token_ids": [7], "ignore_eos": True, "skip_special_tokens": False, "logprobs": 1},
            **{"detokenize": False, "stream_interval": 1 if request.streamed else 32},
        }
        assert wire.headers[0]["x-session-id"] == "one" and "cache_salt" not in body


async def test_tokens_have_the_version_of_the_spans_and_prefixes_are_not_shared_between_versions() -> None:
    async with vllm(0.002) as (engine, wire):
        gate = AdminGate(engine)
        begun = asyncio.Event()
        running = asyncio.create_task(gate.read(request_for(PROMPT, 60), begun))
        await begun.wait()
        await gate.admin.update_weights("/weights/7", 7, PauseMode.IN_PLACE)
        reply = await running
        assert reply.ids == following(PROMPT, 60) and set(reply.versions) == {0, 7}
        assert reply.versions == sorted(reply.versions)
        await complete(engine, request_for(PROMPT, 2))
        assert [body.get("cache_salt") for body in wire.bodies] == [None, "7"]


@pytest.mark.parametrize(
    ("mode", "calls"),
    [
        (PauseMode.IN_PLACE, [("/pause", "mode=keep&clear_cache=false")]),
        (PauseMode.ABORT, [("/pause", "mode=abort&clear_cache=false")]),
        (
            PauseMode.RETRACT,
            [("/pause", "mode=keep&clear_cache=false"), ("/reset_prefix_cache", "reset_running_requests=true")],
        ),
    ],
)
async def test_each_mode_of_pauses_is_one_of_vllm(mode: PauseMode, calls: list[Any]) -> None:
    async with vllm() as (engine, wire):
        await engine.pause(mode)
        assert wire.calls == calls and await engine.rests()
        await engine.resume()
        assert wire.calls[-1] == ("/resume", "") and not await engine.rests()


async def test_without_pauses_requests_are_ended_and_no_mode_keeps_them() -> None:
    async with vllm(0.01, controls=False) as (engine, _):
        running = asyncio.create_task(complete(engine, request_for(PROMPT, 500)))
        await until(lambda: engine._replies)
        with pytest.raises(EngineIncapable, match="abort or drain"):
            await engine.pause(PauseMode.RETRACT)
        await engine.pause(PauseMode.ABORT)
        assert (await running).finish is FinishReason.ABORT


async def test_an_update_is_named_while_it_loads() -> None:
    async with vllm() as (engine, wire):
        assert await engine.update_weights("/weights/3", 3) == 3 and await engine.check() == 3
        begun, *later = wire.calls
        assert begun[0] == "/update_weight_version" and '"/weights/3"' in begun[1]
        loaded = [("/collective_rpc", "/weights/3"), ("/update_weight_version", "3")]
        assert later == [*loaded, ("/reset_prefix_cache", "")]


async def test_a_refused_update_leaves_the_version() -> None:
    async with vllm() as (engine, wire):
        with pytest.raises(InvalidRequest, match="no such folder") as raised:
            await engine.update_weights("/weights/missing", 3)
        assert raised.value.param == "path" and await engine.check() == 0
        assert wire.version == "0"


async def test_an_update_that_a_dead_process_began_is_finished() -> None:
    async with vllm() as (engine, wire):
        wire.before_update.clear()
        updating = asyncio.create_task(engine.update_weights("/weights/3", 3))
        await until(lambda: wire.updating)
        updating.cancel()  # as if the process was killed
        await asyncio.gather(updating, return_exceptions=True)
        wire.before_update.set()
        other = VllmServer(engine.url, VOCABULARY)
        await other.start()
        assert await other.check() == 0
        await other.finish_update()
        assert await other.check() == 3 and wire.version == "3"
        await other.finish_update()
        await other.close()


async def test_an_update_that_cannot_be_finished_keeps_the_server_out() -> None:
    async with vllm() as (engine, wire):
        wire.version = 'tokengrove-update:{"before": 1, "after": 2, "path": "/weights/missing"}'
        with pytest.raises(EngineUnavailable, match="restart the server"):
            await engine.finish_update()


async def test_the_steps_of_a_weight_transfer_are_vllms_and_the_last_names_the_version() -> None:
    async with vllm() as (engine, wire):
        with pytest.raises(EngineIncapable, match="other names"):
            await engine.transfer_weights(WeightTransfer.BEGIN, {})
        with pytest.raises(InvalidRequest, match="pause"):
            await engine.transfer_weights(WeightTransfer.START, {})
        await engine.pause(PauseMode.IN_PLACE)
        await engine.transfer_weights(WeightTransfer.START, {})
        with pytest.raises(InvalidRequest, match="finish_weight_update"):
            await engine.resume()
        assert await engine.check() == 0
        with pytest.raises(InvalidRequest, match="no names"):
            await engine.transfer_weights(WeightTransfer.UPDATE, {"update_info": {}})
        await engine.transfer_weights(WeightTransfer.UPDATE, {"update_info": {"names": ["a"]}})
        assert await engine.transfer_weights(WeightTransfer.FINISH, {"weight_version": "5"}) == 5
        await engine.resume()
        assert await engine.check() == 5
        assert ("/update_weights", {"update_info": {"names": ["a"]}}) in wire.calls


async def test_without_a_version_a_transfer_leaves_the_version() -> None:
    async with vllm() as (engine, wire):
        await engine.pause(PauseMode.ABORT)
        await engine.transfer_weights(WeightTransfer.START, {})
        assert await engine.transfer_weights(WeightTransfer.FINISH, {}) == 0 and wire.version == "0"
        await engine.resume()


async def test_a_server_in_the_middle_of_a_transfer_of_a_dead_process_is_refused() -> None:
    async with vllm() as (engine, _):
        await engine.pause(PauseMode.ABORT)
        await engine.transfer_weights(WeightTransfer.START, {})
        other = VllmServer(engine.url, VOCABULARY)
        with pytest.raises(EngineUnavailable, match="transfer was interrupted"):
            await other.start()
        await other.close()


def event(ids: Any, logprobs: Any, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish}]}


def top(entry: Any) -> dict[str, Any]:
    whole = event([1], [-1.0])
    whole["choices"][0]["logprobs"]["top_logprobs"] = [entry]
    return whole


def spanned(*spans: Any) -> dict[str, Any]:
    whole = event([1, 2], [-1.0, -1.0])
    whole["choices"][0]["weight_versions"] = list(spans)
    return whole


def reply(top: int = 0) -> VllmReply:
    return VllmReply(VersionNumbers(), PromptIds(ids_of([1, 2, 3])), top, RULE)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (event(None, [-1.0]), EngineFailed),
        (event([1, 2], [-1.0]), EngineFailed),
        (event([1], [None]), EngineFailed),
        (event(["one"], [-1.0]), EngineFailed),
        (event([1], ["low"]), EngineFailed),
        (event([1], [-9999.0]), EngineFailed),
        (top({"one": -1.0}), EngineFailed),
        (top(None), EngineFailed),
        ({"choices": ["one"]}, EngineFailed),
        ({"choices": [], "usage": {"prompt_tokens": 2}}, EngineFailed),
        (event([1], [-1.0], "error"), EngineFailed),
        (event([1], [-1.0], "something_new"), EngineFailed),
        ([], EngineFailed),
        (spanned({"version": "0", "start": 0, "end": 1}), EngineFailed),
        (spanned({"version": "0", "start": 1, "end": 2}), EngineFailed),
        (spanned({"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 1, "end": 2}), EngineFailed),
        (spanned({"start": 0}), EngineFailed),
        (spanned("0"), EngineFailed),
        ({"error": {"message": "no", "code": 400}}, InvalidRequest),
        ({"error": {"message": "no", "code": 500}}, EngineFailed),
        ({"error": "no"}, InvalidRequest),
    ],
)
def test_incomplete_or_refused_replies_fail(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        reply(1).read([wrong], 0, 0)


@pytest.mark.parametrize(("version", "unsure"), [("0", 0), ("1", 0), ("7", 2)])
def test_spans_of_a_version_that_was_not_published_are_uncertain(version: str, unsure: int) -> None:
    read = reply()
    read.numbers.believed.add(1)
    chunks = [*read.read([spanned({"version": version, "start": 0, "end": 2})], 0, 1), *read.last()]
    assert sum(chunk.unsure for chunk in chunks) == unsure


@pytest.mark.parametrize("name", ["stop", "length", "abort"])
def test_finish_reasons(name: str) -> None:
    read = reply()
    (chunk,) = read.read([event([1], [-1.0], name)], 0, 0)
    assert chunk.finish is None  # until the token counts arrive
    (last,) = read.read([{"choices": [], "usage": {"prompt_tokens": 3}}], 0, 0)
    assert last.finish is FinishReason(name) and read.last() == []
    without = reply()
    without.read([event([1], [-1.0], name)], 0, 0)
    assert [chunk.finish for chunk in without.last()] == [FinishReason(name)]


def test_of_twenty_alternatives_a_sampled_token_of_lower_rank_is_none() -> None:
    tops = [{"token_id": 9, "logprob": -8.0, "rank": 400}] + [
        {"token_id": token, "logprob": -float(token), "rank": token} for token in range(1, 20)
    ]
    content = [{"token_id": 9, "logprob": -8.0, "rank": 400, "top_logprobs": tops}]
    (chunk,) = reply(20).read([{"choices": [{"token_ids": [9], "logprobs": {"content": content}}]}], 0, 0)
    assert [token for token, _ in chunk.top_logprobs[0]] == list(range(1, 20))


async def test_sleep_releases_all_memory_and_waking_may_be_in_steps() -> None:
    async with vllm() as (engine, wire):
        with pytest.raises(InvalidRequest) as raised:
            await engine.release_memory(("kv_cache",))
        assert raised.value.param == "tags"
        await engine.release_memory()
        await engine.resume_memory(("weights", "cuda_graph"))
        await engine.resume_memory(("cuda_graph",))
        await engine.resume_memory()
        await engine.flush_cache()
        asked = [("/sleep", "level=1"), ("/wake_up", "tags=weights"), ("/wake_up", ""), ("/reset_prefix_cache", "")]
        assert wire.calls == asked
