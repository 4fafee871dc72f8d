"""Logprobs of prompts from simulated SGLang and vLLM servers: what is sent, what is read, and what fails."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import request_for
from proxy.engine.interface import AdapterSource, Capability, PauseMode
from proxy.engine.mailbox import Mailbox
from proxy.engine.requests import GenerateRequest
from proxy.engine.scored_prompt import ScoredPrompt, sample_scores
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.sent_images import Eyes, SentImages
from proxy.engine.servers.sglang_server import SglangServer
from proxy.engine.servers.vllm_wire import completions_body, generate_body, sampling_params
from proxy.engine.sglang.facts import capabilities_by
from proxy.types import Logprobs, ids_of
from tests.engines.pictures import asks, drawn
from tests.engines.pools import OVER_BOTH, PROMPT, pool_of, wires
from tests.engines.scripts import VOCABULARY, following, model_like
from tests.engines.spans import around
from tests.engines.wire import IMAGE, LiveWire, adapter_taste, score_of, tops_of
from tests.support import until
from tokengrove.errors import EngineFailed, InvalidRequest, UnsupportedParameter
from tokengrove.reasons import FinishReason

KINDS = pytest.mark.parametrize("kind", ["sglang", "vllm", "vllm-completions"])
"""Over SGLang, and over vLLM with and without its endpoint for ids."""

Spoil = Callable[[dict[str, Any]], None]


def scoring(first: int, top: int = 0, prompt: Any = PROMPT) -> GenerateRequest:
    return replace(request_for(prompt, 1), scored_from=first, top_logprobs=top, whole=True)


class OneServer:
    """A pool over one simulated server of a kind."""

    def __init__(self, kind: str) -> None:
        self._kind, self._live = kind, LiveWire(kind.partition("-")[0])

    async def __aenter__(self) -> tuple[Pool, Any]:
        await self._live.start()
        wire = self._live.wire
        if self._kind == "vllm-completions":
            wire.scale_out = False
        self._pool = pool_of(self._live.url)
        return await self._pool.__aenter__(), wire

    async def __aexit__(self, *error: Any) -> None:
        await self._pool.__aexit__(*error)
        await self._live.kill()


async def scored(pool: Pool, request: GenerateRequest) -> TokenChunk:
    """The chunk with the logprobs of the prompt, after which one token was sampled."""
    chunks: list[TokenChunk] = []
    assert await pool.sample(request, chunks.append) is FinishReason.LENGTH
    assert [token for chunk in chunks for token in chunk.ids] == following(request.input_ids, 1)
    (found,) = [chunk for chunk in chunks if chunk.prompt_logprobs is not None]
    return found


@KINDS
@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("first", [1, 7, 19, 20])
async def test_each_token_from_the_first_on_has_its_logprob(kind: str, top: int, first: int) -> None:
    async with OneServer(kind) as (pool, _):
        chunk = await scored(pool, scoring(first, top))
        places = range(first, len(PROMPT))
        assert list(chunk.prompt_logprobs or ()) == [score_of(place, PROMPT[place]) for place in places]
        assert chunk.prompt_top == (tuple(tuple(tops_of(place, top)) for place in places) if top else ())


async def test_sglang_is_asked_from_the_token_before_the_first_one() -> None:
    async with OneServer("sglang") as (pool, wire):
        await scored(pool, scoring(7, 3))
        (body,) = wire.scoring
        asked = {name: body[name] for name in ("logprob_start_len", "top_logprobs_num", "return_logprob", "stream")}
        assert asked == {"logprob_start_len": 6, "top_logprobs_num": 3, "return_logprob": True, "stream": False}
        params = body["sampling_params"]
        assert (params["max_new_tokens"], params["temperature"], params["ignore_eos"]) == (1, 1.0, True)


@pytest.mark.parametrize("kind", ["vllm", "vllm-completions"])
async def test_vllm_is_asked_without_a_stream(kind: str) -> None:
    async with OneServer(kind) as (pool, wire):
        await scored(pool, scoring(7, 3))
        (body,) = wire.scoring
        params = body.get("sampling_params", body)
        assert (params["prompt_logprobs"], params["max_tokens"], params["temperature"]) == (3, 1, 1.0)
        assert not {"stream", "stream_options"} & body.keys()


async def test_a_vllm_that_refuses_requests_without_top_k_gets_one() -> None:
    async with wires(0, live := LiveWire("vllm")):
        live.wire.masks = True
        async with pool_of(live.url) as pool:
            await scored(pool, scoring(7))
            await scored(pool, replace(scoring(7), sampling=scoring(7).sampling._replace(top_k=5)))
        assert [body["sampling_params"]["top_k"] for body in live.wire.scoring] == [1, 5]


async def test_other_requests_are_sent_as_before() -> None:
    request = replace(request_for(PROMPT, 8, seed=3), top_logprobs=2, whole=True)
    params = {
        "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop_token_ids": [],
        "ignore_eos": True, "skip_special_tokens": False, "seed": 3,
    }  # fmt: skip
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    assert json.dumps(sampling_params(request, {})) == json.dumps(params)
    named = {"sampling_params": {**params, "logprobs": 3, "detokenize": False, "stream_interval": 32}, **streamed}
    assert json.dumps(generate_body(request, dict(params), 32)) == json.dumps(named)
    names = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    assert json.dumps(completions_body(request, dict(params))) == json.dumps(
        {**params, "logprobs": 2, **names, **streamed}
    )
    body = SglangServer("http://127.0.0.1:1", VOCABULARY)._body(request, "0123", streamed=False)
    assert orjson.dumps(body) == (
        b'{"rid":"0123","sampling_params":{"max_new_tokens":8,"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,'
        b'"stop_token_ids":[],"ignore_eos":true,"skip_special_tokens":false,"sampling_seed":3},"return_logprob":true,'
        b'"logprob_start_len":-1,"top_logprobs_num":2,"stream":false}'
    )


def of_sglang(change: Callable[[list[Any], list[Any]], Any]) -> Spoil:
    """Changes SGLang's logprobs of tokens and their alternatives."""
    return lambda told: change(told["input_token_logprobs"], told["input_top_logprobs"])


@pytest.mark.parametrize(
    ("spoils", "fault"),
    [
        (of_sglang(lambda tokens, _: tokens.pop()), "gave 12 logprobs for 13 tokens of the prompt"),
        (of_sglang(lambda tokens, _: tokens.append([-1.0, 5, None])), "gave 14 logprobs for 13 tokens"),
        (of_sglang(lambda tokens, _: tokens.clear()), "gave 0 logprobs for 13 tokens"),
        (of_sglang(lambda tokens, _: tokens[3].__setitem__(1, 9)), "logprob of token 9, but the prompt has token 49"),
        (of_sglang(lambda tokens, _: tokens[3].__setitem__(1, 0)), "logprob of token 0, but the prompt has token 49"),
        (of_sglang(lambda tokens, _: tokens[3].__setitem__(0, None)), "without its logprob"),
        (of_sglang(lambda tokens, _: tokens[3].__setitem__(0, "x")), "without its logprob"),
        (of_sglang(lambda tokens, _: tokens[3].__setitem__(0, 0.5)), "logprob 0.5"),
        (of_sglang(lambda tokens, _: tokens[3].clear()), "SGLang's form"),
        (of_sglang(lambda _, tops: tops.pop()), "12 lists of alternatives for 13 tokens"),
        (of_sglang(lambda _, tops: tops.clear()), "0 lists of alternatives for 13 tokens"),
        (of_sglang(lambda _, tops: tops[3].append([-9.0, 4, None])), "gave 3 alternatives .* asked for 2"),
        (of_sglang(lambda _, tops: tops[3][0].__setitem__(0, None)), "an alternative without its logprob"),
        (of_sglang(lambda _, tops: tops[3][0].__setitem__(1, VOCABULARY)), "no token of the model"),
        (of_sglang(lambda _, tops: tops[3][0].__setitem__(0, 0.5)), "logprob 0.5"),
        (lambda told: told.pop("input_top_logprobs"), "SGLang's form"),
        (lambda told: told.pop("input_token_logprobs"), "gave 0 logprobs for 13 tokens"),
    ],
)
async def test_a_wrong_answer_of_sglang_fails(spoils: Spoil, fault: str) -> None:
    async with OneServer("sglang") as (pool, wire):
        wire.spoils = spoils
        with pytest.raises(EngineFailed, match=fault):
            await scored(pool, scoring(7, 2))


def of_vllm(place: int, token: int, **fields: Any) -> Spoil:
    """Changes fields of a token at a place of vLLM's logprobs."""
    return lambda told: told["prompt_logprobs"][place][str(token)].update(fields)


@pytest.mark.parametrize("kind", ["vllm", "vllm-completions"])
@pytest.mark.parametrize(
    ("spoils", "fault"),
    [
        (lambda told: told["prompt_logprobs"].pop(), "logprobs of 19 tokens for a prompt of 20 tokens"),
        (lambda told: told["prompt_logprobs"].append({}), "logprobs of 21 tokens for a prompt of 20 tokens"),
        (lambda told: told.update(prompt_logprobs=None), "no logprobs of the prompt"),
        (lambda told: told["prompt_logprobs"].__setitem__(9, None), "vLLM's form"),
        (lambda told: told["prompt_logprobs"][9].pop("49"), "other tokens than the prompt has: token 49"),
        (of_vllm(9, 49, logprob=None), "without its logprob"),
        (of_vllm(9, 49, logprob=0.5), "logprob 0.5"),
        (of_vllm(9, 49, logprob=-9999.0), "logprob -9999, which vLLM writes for probability 0"),
        (of_vllm(9, 49, rank=1), "gave 3 alternatives"),
        (of_vllm(9, 10, logprob="x"), "an alternative without its logprob"),
        (of_vllm(9, 10, logprob=0.5), "logprob 0.5"),
        (lambda told: told["prompt_logprobs"][9].update({"99999": {"logprob": -1.0, "rank": 1}}), "3 alternatives"),
        (lambda told: told["prompt_logprobs"][9].update(x=told["prompt_logprobs"][9].pop("10")), "vLLM's form"),
    ],
)
async def test_a_wrong_answer_of_vllm_fails(kind: str, spoils: Spoil, fault: str) -> None:
    async with OneServer(kind) as (pool, wire):
        wire.spoils = spoils
        with pytest.raises(EngineFailed, match=fault):
            await scored(pool, scoring(7, 2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_fail(value: float) -> None:
    request = ScoredPrompt.of(scoring(18), VOCABULARY)
    with pytest.raises(EngineFailed, match="NaN" if math.isnan(value) else "infinite"):
        request.check([-1.0, value], ())
    with pytest.raises(EngineFailed, match="NaN" if math.isnan(value) else "infinite"):
        ScoredPrompt.of(scoring(18, 1), VOCABULARY).check([-1.0, -1.0], [((1, -1.0),), ((1, value),)])


async def test_very_low_logprobs_are_kept() -> None:
    async with OneServer("vllm") as (pool, wire):
        wire.spoils = of_vllm(9, 49, logprob=-12345.0)
        chunk = await scored(pool, scoring(7))
        assert chunk.prompt_logprobs is not None and chunk.prompt_logprobs[2] == -12345.0


async def test_impossible_alternatives_of_vllm_are_left_out() -> None:
    async with OneServer("vllm") as (pool, wire):
        wire.spoils = of_vllm(9, 11, logprob=-9999.0)
        chunk = await scored(pool, scoring(7, 2))
        assert chunk.prompt_top[2] == tuple(tops_of(9, 1)) and len(chunk.prompt_top[3]) == 2


async def test_the_last_token_of_the_vocabulary_is_named_0_by_sglang() -> None:
    async with OneServer("sglang") as (pool, wire):
        wire.spoils = of_sglang(lambda tokens, _: [entry.__setitem__(1, entry[1] % 639) for entry in tokens])
        prompt = PROMPT[:10] + ids_of([VOCABULARY - 1, 0, VOCABULARY - 1])
        chunk = await scored(pool, scoring(5, 0, prompt))
        assert list(chunk.prompt_logprobs or ()) == [score_of(place, prompt[place]) for place in range(5, 13)]


@pytest.mark.parametrize("first", [0, -1, 21])
@KINDS
async def test_other_positions_are_refused(kind: str, first: int) -> None:
    async with OneServer(kind) as (pool, wire):
        with pytest.raises(InvalidRequest, match="scored_from must be between 1 and the length of the prompt, 20"):
            await scored(pool, scoring(first))
        assert not wire.scoring


@pytest.mark.parametrize("kind", ["vllm", "vllm-completions"])
async def test_more_alternatives_than_vllm_gives_are_refused(kind: str) -> None:
    async with OneServer(kind) as (pool, _):
        with pytest.raises(InvalidRequest, match="prompt logprobs of 21, which is greater than max allowed: 20"):
            await scored(pool, scoring(7, 21))
        await scored(pool, scoring(7, 20))


@OVER_BOTH
async def test_after_images(kind: str) -> None:
    red = drawn(1, 84, 56)
    ids, (placed,) = around(red)
    after, eyes = placed.start + placed.length, Eyes(SentImages(), (IMAGE,))
    async with wires(0, live := LiveWire(kind)):
        live.wire.sees = True
        engine = await connect(VOCABULARY, None, eyes=eyes)(live.url)
        chunks = list[TokenChunk]()
        asked = replace(asks(ids, [placed], (red,), 1), whole=True, top_logprobs=2)
        assert await engine.sample(replace(asked, scored_from=after), chunks.append) is FinishReason.LENGTH
        (chunk,) = chunks
        assert list(chunk.prompt_logprobs or ()) == [score_of(at, ids[at]) for at in range(after, len(ids))]
        assert chunk.prompt_top == tuple(tuple(tops_of(at, 2)) for at in range(after, len(ids)))
        among = replace(asked, scored_from=after - 1)
        if kind == "sglang":
            with pytest.raises(UnsupportedParameter, match="placeholders of images"):
                await engine.sample(among, chunks.append)
        else:
            assert await engine.sample(among, chunks.append) is FinishReason.LENGTH
        await engine.close()


@pytest.mark.parametrize(
    ("lora", "targets", "controls", "able"),
    [
        (False, None, True, True),
        (True, ("q_proj", "o_proj"), True, True),
        (True, None, True, False),
        (True, (), True, False),
        (True, ("q_proj", "lm_head"), True, False),
        (True, ("model.lm_head",), True, False),
        (True, ("q_proj",), False, False),  # it does not tell
    ],
)
async def test_a_vllm_whose_output_layer_may_have_adapters_gives_none(
    lora: bool, targets: tuple[str, ...] | None, controls: bool, able: bool
) -> None:
    async with wires(0, live := LiveWire("vllm")):
        live.wire.lora, live.wire.targets, live.wire.controls = lora, targets, controls
        async with pool_of(live.url) as pool:
            assert (Capability.PROMPT_LOGPROBS in pool.info().capabilities) is able
            (member,) = pool._members
            assert any("--lora-target-modules" in what for what in member.engine.missing) is not able


@OVER_BOTH
async def test_the_pool_counts_them_and_scores_with_adapters(kind: str, tmp_path: Any) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    async with OneServer(kind) as (pool, wire):
        able = pool.info().capabilities
        assert Capability.PROMPT_LOGPROBS in able and Capability.PROMPT_TEMPERATURE not in able
        await pool.load_adapter(4, AdapterSource(str(tmp_path)))
        chunks: list[TokenChunk] = []
        await pool.sample(replace(scoring(7), adapter=4), chunks.append)
        assert [chunk.version for chunk in chunks] == [4]
        assert list(chunks[0].ids) == following(PROMPT, 1, adapter_taste(tmp_path))
        assert len(chunks[0].prompt_logprobs or ()) == 13
        assert (wire.scoring[0].get("lora_path") or wire.scoring[0]["model"]) in wire.adapters
        (shown,) = pool.servers()
        assert (shown["served"], shown["prompt_tokens"], shown["cached_tokens"]) == (1, len(PROMPT), 3)


@OVER_BOTH
async def test_an_aborted_request_has_no_logprobs(kind: str) -> None:
    async with wires(0, live := LiveWire(kind)):
        engine = await connect(VOCABULARY, None)(live.url)
        await engine.pause(PauseMode.IN_PLACE)  # holds the requests
        for ends in (lambda request: engine.abort(request.request_id), lambda _: engine.pause(PauseMode.ABORT)):
            request, chunks = scoring(7), list[TokenChunk]()
            running = asyncio.create_task(engine.sample(request, chunks.append))
            await until(lambda: bool(live.wire.engine.running))
            await ends(request)
            assert await running is FinishReason.ABORT
            assert all(chunk.prompt_logprobs is None for chunk in chunks)
        await engine.resume()
        await engine.close()


@OVER_BOTH
async def test_a_prompt_is_scored_again_if_the_weights_changed_meanwhile(kind: str) -> None:
    async with wires(0, live := LiveWire(kind)):
        engine = await connect(VOCABULARY, None)(live.url)
        chunks = list[TokenChunk]()
        await engine.pause(PauseMode.IN_PLACE)
        running = asyncio.create_task(engine.sample(scoring(7), chunks.append))
        await until(lambda: len(live.wire.scoring) == 1)
        await engine.update_weights("/weights/1", 1)
        await engine.resume()
        assert await running is FinishReason.LENGTH
        assert len(live.wire.scoring) == 2 and [chunk.version for chunk in chunks] == [1]
        assert len(chunks[0].prompt_logprobs or ()) == 13
        await engine.close()


async def test_chunks_are_passed_on_until_the_caller_has_enough() -> None:
    finishes = iter([None, FinishReason.STOP, None])

    async def sample(request: GenerateRequest, take: Any) -> FinishReason | None:
        for token in (1, 2, 3):
            take(TokenChunk(ids_of([token]), Logprobs("f", [-1.0])))
        return FinishReason.LENGTH

    given = list[int]()

    def take(chunk: TokenChunk) -> FinishReason | None:
        given.extend(chunk.ids)
        return next(finishes)

    assert await sample_scores(sample, scoring(7), take, lambda: 0) is FinishReason.STOP
    assert given == [1, 2]


def test_engines_without_a_model_give_no_logprobs_of_prompts() -> None:
    both = {Capability.PROMPT_LOGPROBS, Capability.PROMPT_TEMPERATURE}
    assert not both & Mailbox(VOCABULARY, 100).info().capabilities
    assert not both & ScriptedEngine(model_like(), vocab_size=VOCABULARY).info().capabilities
    assert both & capabilities_by({}) == {Capability.PROMPT_LOGPROBS}
