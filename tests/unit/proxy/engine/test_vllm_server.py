"""vLLM servers: requests that would break the logprob rule are refused, incomplete replies fail, sleep is whole."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from proxy.engine.contract import complete, request_for
from proxy.engine.interface import Capability, PauseMode
from proxy.engine.servers.vllm_server import VllmServer, _chunks
from proxy.types import ids_of
from tests.engines.scripts import VOCABULARY, following
from tests.engines.wire import serving_wire
from tokengrove.errors import EngineFailed, EngineUnavailable, InvalidRequest, UnsupportedParameter
from tokengrove.reasons import FinishReason

PROMPT = ids_of(range(40, 60))


@contextlib.asynccontextmanager
async def vllm(*, processed: bool = False) -> AsyncIterator[tuple[VllmServer, Any]]:
    async with serving_wire("vllm") as (url, wire):
        engine = VllmServer(url, VOCABULARY, processed_logprobs=processed)
        await engine.start()
        yield engine, wire
        await engine.close()


@pytest.mark.parametrize(
    ("processed", "refused", "allowed"),
    [
        (False, {"temperature": 0.7}, {"temperature": 0.0}),
        (False, {"presence_penalty": 0.1}, {"top_p": 0.5}),
        (False, {"frequency_penalty": 0.1}, {"top_k": 3}),
        (False, {"repetition_penalty": 1.1}, {"min_p": 0.1}),
        (False, {"logit_bias": ((3, 1.0),)}, {}),
        (False, {"min_tokens": 2}, {"min_tokens": 0}),
        (True, {"temperature": 0.0}, {"temperature": 0.7}),
        (True, {"top_p": 0.5}, {"presence_penalty": 0.1}),
        (True, {"top_k": 3}, {"logit_bias": ((3, 1.0),)}),
        (True, {"min_p": 0.1}, {}),
        (True, {"top_k": 3}, {"min_tokens": 2}),
    ],
)
async def test_parameters_that_would_break_the_logprob_rule_are_refused_by_name(processed, refused, allowed) -> None:
    async with vllm(processed=processed) as (engine, _):
        request = request_for(PROMPT, 4)
        with pytest.raises(UnsupportedParameter) as raised:
            await complete(engine, replace(request, sampling=request.sampling._replace(**refused)))
        assert raised.value.param in refused
        reply = await complete(engine, replace(request, sampling=request.sampling._replace(**allowed)))
        assert reply.ids == following(PROMPT, 4)
        assert (Capability.PENALTIES in engine.info().capabilities) is processed
        assert (Capability.MIN_TOKENS in engine.info().capabilities) is processed


def event(ids: Any, logprobs: Any, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": finish}]}


def top(entry: Any) -> dict[str, Any]:
    whole = event([1], [-1.0])
    whole["choices"][0]["logprobs"]["top_logprobs"] = [entry]
    return whole


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
        (event([1], [-1.0], "error"), EngineFailed),
        (event([1], [-1.0], "something_new"), EngineFailed),
        ([], EngineFailed),
        ({"error": {"message": "no", "code": 400}}, InvalidRequest),
        ({"error": {"message": "no", "code": 500}}, EngineFailed),
        ({"error": "no"}, InvalidRequest),
    ],
)
def test_incomplete_or_refused_replies_fail(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _chunks(wrong, 1)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH), ("abort", FinishReason.ABORT), (None, None)],
)
def test_finish_reasons(reason: str | None, finish: FinishReason | None) -> None:
    assert _chunks(event([1], [-1.0], reason), 0)[0].finish is finish
    assert _chunks({"choices": []}, 0) == []


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


async def test_updates_from_a_folder_and_pauses_that_keep_requests_are_refused() -> None:
    async with vllm() as (engine, _):
        with pytest.raises(EngineUnavailable, match="cannot load weights"):
            await engine.update_weights("/weights/1")
        await engine.pause(PauseMode.RETRACT)  # allowed, as no request runs
        await engine.resume()
