"""The transformers engine on the built-in model: the contract of all engines, and exact logprobs, grammars, weights."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import (
    CHECKS,
    CollectedReply,
    ContractCheck,
    check_grammars_are_followed,
    complete,
    request_for,
)
from proxy.engine.gate import Gate
from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.interface import Capability, Engine, PauseMode
from proxy.engine.tiny.model import build_tiny_model
from proxy.engine.transformers.engine import TransformersEngine
from proxy.settings import Settings
from proxy.types import SamplingParams, ids_of
from tests.engines.crowds import Growing, abort_after, converse, converse_all, leave_after
from tests.engines.forward import plain_logprobs
from tests.engines.gates import AdminGate
from tests.support import until
from tests.wide import WIDE, first
from tokengrove.errors import ConfigurationError, ContextLengthExceeded, EngineFailed, EngineUnavailable, InvalidRequest
from tokengrove.reasons import FinishReason

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

PROMPT = ids_of(range(40, 60))


def started(folder: Path, *engine_arg: str) -> TransformersEngine:
    engine = TransformersEngine(Settings(engine_arg=engine_arg), folder)
    asyncio.run(engine.start())
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other")
    build_tiny_model(path, seed=1)
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = started(folder)  # an engine is not bound to an event loop, so each test may have its own loop
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def own_engine(folder: Path) -> Iterator[TransformersEngine]:
    """An engine for one test to pause, kill or fill; its cache holds 2048 tokens."""
    engine = started(folder, "cache_mb=1")
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


async def begun(engine: TransformersEngine, max_tokens: int) -> tuple[CollectedReply, AsyncIterator[TokenChunk]]:
    """Start a request; return its reply after the first token, and the iterator of further chunks."""
    reply, chunks = CollectedReply(), engine.generate(request_for(PROMPT, max_tokens))
    reply.add(await anext(chunks))
    return reply, chunks


async def read_rest(reply: CollectedReply, chunks: AsyncIterator[TokenChunk]) -> None:
    async for chunk in chunks:
        reply.add(chunk)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(engine: TransformersEngine, check: ContractCheck) -> None:
    await check(engine, PROMPT)


async def test_contract_of_grammars(engine: TransformersEngine, tokenizer) -> None:
    await check_grammars_are_followed(engine, PROMPT, tokenizer.decode, [tokenizer.eos_token_id])


def test_it_implements_engine_and_reports_its_capabilities(engine: TransformersEngine) -> None:
    info = engine.info()
    assert isinstance(engine, Engine)
    assert info.capabilities == frozenset(Capability) - {Capability.IMAGES}
    assert info.context_length == 131072
    assert "noise" in info.detail


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_p=0.8, top_k=40, min_p=0.01),
    ],
    ids=["1", "0.7", "0", "truncated"],
)
async def test_logprobs_equal_a_plain_forward_pass(engine, folder: Path, sampling: SamplingParams) -> None:
    request = replace(request_for(PROMPT, 60), sampling=sampling._replace(max_tokens=60, seed=1))
    reply = await complete(engine, request)
    assert reply.logprobs == pytest.approx(plain_logprobs(folder, PROMPT, reply.ids, sampling.temperature), abs=1e-4)


async def test_a_growing_session_reuses_its_prefix_and_stays_exact(engine, folder: Path) -> None:
    prompt, cached = ids_of([7, 8, 9] * 50), []
    for _ in range(3):
        chunks = [chunk async for chunk in engine.generate(request_for(prompt, 40))]
        ids = [token for chunk in chunks for token in chunk.ids]
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        assert logprobs == pytest.approx(plain_logprobs(folder, prompt, ids), abs=1e-4)
        cached.append(chunks[0].cached_tokens)
        prompt = ids_of([*prompt, *ids, 11, 12, 13])
    assert cached[1] >= 160 and cached[2] >= 192


async def test_requests_of_very_different_lengths_share_a_batch(engine, folder: Path) -> None:
    prompts = [ids_of([5 + n % 600 for n in range(length)]) for length in (1, 3000, 2, 700, 33, 1500)]
    replies = await asyncio.gather(*(complete(engine, request_for(prompt, 20)) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.logprobs == pytest.approx(plain_logprobs(folder, prompt, reply.ids), abs=1e-4)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(engine) -> None:
    alone = await complete(engine, request_for(PROMPT, 30, seed=5))
    crowd = [request_for(ids_of(range(n + 1, n + 30)), 30) for n in range(63)]
    replies = await asyncio.gather(
        *(complete(engine, request) for request in [request_for(PROMPT, 30, seed=5), *crowd])
    )
    assert replies[0].ids == alone.ids


@WIDE
async def test_many_concurrent_sessions_get_the_same_tokens_as_alone(engine, folder: Path) -> None:
    together = await converse_all(engine, 32)
    await engine.flush_cache()
    for number, session in enumerate(together):
        alone = await converse(engine, Growing(number))
        assert [(turn.prompt, turn.reply.ids) for turn in session] == [(turn.prompt, turn.reply.ids) for turn in alone]
        for turn in session:
            expected = plain_logprobs(folder, turn.prompt, turn.reply.ids, temperature=0.0)
            assert turn.reply.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.wide
async def test_requests_that_are_closed_or_aborted_halfway_disturb_no_other(own_engine, folder: Path) -> None:
    prompts = [ids_of(range(n, n + 20)) for n in range(12)]
    leaving = [leave_after(own_engine, prompt, 1 + 3 * n, 300) for n, prompt in enumerate(prompts)]
    aborted = [abort_after(own_engine, prompt, 1 + 3 * n, 300) for n, prompt in enumerate(prompts)]
    staying, replies, *_ = await asyncio.gather(
        converse_all(own_engine, 16), asyncio.gather(*aborted), asyncio.gather(*leaving)
    )
    for number, session in enumerate(staying):
        alone = await converse(own_engine, Growing(number))
        assert [turn.reply.ids for turn in session] == [turn.reply.ids for turn in alone]
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.finish is FinishReason.ABORT and len(reply.ids) < 300
        assert reply.logprobs == pytest.approx(plain_logprobs(folder, prompt, reply.ids), abs=1e-4)
    whole_cache = request_for(ids_of([3] * 2000), 48)  # cannot run unless all other tokens were freed
    assert len((await complete(own_engine, whole_cache)).ids) == 48


def call_grammar(tokenizer, *, repeat: bool = False) -> Grammar:
    begin, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    item = {"type": "object", "properties": {"line": {"type": "integer"}, "kind": {"enum": ["add", "remove"]}}}
    properties = {"path": {"type": "string"}, "edits": {"type": "array", "items": item}, "force": {"type": "boolean"}}
    schemas = {
        "edit_file": {"type": "object", "properties": properties, "required": ["path", "edits"]},
        "stop": {"type": "object", "properties": {}},
    }
    alternatives = tuple(
        (
            GrammarPart(token_id=begin),
            GrammarPart(text=f'\n{{"name": "{name}", "arguments": '),
            GrammarPart(schema=schema),
            GrammarPart(text="}\n"),
            GrammarPart(token_id=end),
        )
        for name, schema in schemas.items()
    )
    return Grammar(alternatives, repeat=repeat, separator="\n" if repeat else "")


async def test_random_weights_write_well_formed_complete_calls(engine, tokenizer) -> None:
    async def call(seed: int) -> list[dict]:
        grammar = call_grammar(tokenizer, repeat=seed % 2 == 1)
        request = request_for(PROMPT, 150 + seed, seed=seed)
        reply = await complete(engine, replace(request, grammar=grammar, stop_token_ids=(tokenizer.eos_token_id,)))
        assert reply.finish is FinishReason.STOP
        bodies = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", tokenizer.decode(reply.ids[:-1]), re.DOTALL)
        return [json.loads(body) for body in bodies]

    for calls in await asyncio.gather(*(call(seed) for seed in range(20))):
        assert calls
        for value in calls:
            assert value["name"] in ("edit_file", "stop")
            assert value["name"] == "stop" or isinstance(value["arguments"]["path"], str)


async def test_an_invalid_schema_is_refused_by_name(engine) -> None:
    request = replace(request_for(PROMPT, 10), grammar=Grammar(((GrammarPart(schema={"type": "nonsense"}),),)))
    with pytest.raises(InvalidRequest, match=r"^'tools' cannot be compiled .*nonsense") as refused:
        await complete(engine, request)
    assert refused.value.param == "tools"


@pytest.mark.wide
async def test_new_weights_in_mid_generation_give_runs_of_versions(
    own_engine, folder: Path, other_folder: Path
) -> None:
    reply, chunks = await begun(own_engine, 1500)
    assert await own_engine.update_weights(str(other_folder)) == 1
    await read_rest(reply, chunks)
    before = reply.versions.count(0)
    assert reply.versions == [0] * before + [1] * (1500 - before) and 0 < before < 1500
    old, new = (plain_logprobs(path, PROMPT, reply.ids) for path in (folder, other_folder))
    assert reply.logprobs == pytest.approx(old[:before] + new[before:], abs=1e-4)
    assert await own_engine.update_weights(str(folder), version=17) == own_engine.info().weight_version == 17


async def test_weights_of_another_model_are_refused(own_engine, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="not a Hugging Face model folder"):
        await own_engine.update_weights(str(tmp_path))
    build_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(InvalidRequest, match="another model"):
        await own_engine.update_weights(str(tmp_path))
    assert own_engine.info().weight_version == 0
    await complete(own_engine, request_for(PROMPT, 4))


@pytest.mark.parametrize("mode", first([PauseMode.IN_PLACE, PauseMode.RETRACT]))
@pytest.mark.wide
async def test_a_pause_stops_sampling_and_loses_no_token(own_engine, folder: Path, mode: PauseMode) -> None:
    reply, chunks = await begun(own_engine, 500)
    await own_engine.pause(mode)
    late = asyncio.create_task(complete(own_engine, request_for(PROMPT, 5)))
    await asyncio.sleep(0.2)
    assert not late.done()
    await own_engine.resume()
    await read_rest(reply, chunks)
    assert len(reply.ids) == 500 and len((await late).ids) == 5
    assert reply.logprobs == pytest.approx(plain_logprobs(folder, PROMPT, reply.ids), abs=1e-4)


async def test_a_pause_of_mode_abort_ends_requests_in_flight(own_engine) -> None:
    readings = [await begun(own_engine, 2000) for _ in range(3)]
    await own_engine.pause(PauseMode.ABORT)
    for reply, chunks in readings:
        await read_rest(reply, chunks)
        assert reply.finish is FinishReason.ABORT
    await own_engine.resume()
    assert len((await complete(own_engine, request_for(PROMPT, 5))).ids) == 5


async def test_flushing_empties_the_prefix_cache(own_engine) -> None:
    prompt = ids_of(range(200))
    cached = []
    for flush in (False, False, True):
        if flush:
            await own_engine.flush_cache()
        chunks = [chunk async for chunk in own_engine.generate(request_for(prompt, 2))]
        cached.append(chunks[0].cached_tokens)
    assert cached == [0, 192, 0]


@WIDE
async def test_more_requests_than_the_cache_holds_all_complete_exactly(own_engine, folder: Path) -> None:
    prompts = [ids_of(range(n, n + 150)) for n in range(24)]
    replies = await asyncio.gather(*(complete(own_engine, request_for(prompt, 150)) for prompt in prompts))
    assert own_engine.info().context_length == 2048 < 24 * 300
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.logprobs == pytest.approx(plain_logprobs(folder, prompt, reply.ids), abs=1e-4)


async def test_a_request_longer_than_the_cache_is_refused(own_engine) -> None:
    assert len((await complete(own_engine, request_for(ids_of([3] * 2000), 48))).ids) == 48
    with pytest.raises(ContextLengthExceeded):
        await complete(own_engine, request_for(ids_of([3] * 2000), 49))


async def test_a_dead_batching_thread_fails_every_request_and_is_told(own_engine, caplog) -> None:
    def break_down(*_: object) -> None:
        raise RuntimeError("out of luck")

    own_engine._model.register_forward_pre_hook(break_down)
    results = await asyncio.gather(
        *(complete(own_engine, request_for(PROMPT, 50)) for _ in range(3)), return_exceptions=True
    )
    assert all(isinstance(result, EngineFailed) for result in results)
    with pytest.raises(EngineFailed, match="out of luck"):
        await complete(own_engine, request_for(PROMPT, 50))
    await until(lambda: own_engine.failure)  # the watcher of the thread has seen it
    with pytest.raises(EngineUnavailable, match=r"out of luck; restart the server"):
        Gate(own_engine, Settings()).check_alive()
    assert [record.levelname for record in caplog.records if record.getMessage() == "engine is dead"] == ["CRITICAL"]


async def test_nan_logits_fail_their_request_alone(own_engine) -> None:
    import torch

    weight = own_engine._model.model.embed_tokens.weight
    with torch.no_grad():
        weight[3] = float("nan")
    with pytest.raises(EngineFailed, match="not finite numbers"):
        await complete(own_engine, request_for(ids_of([3]), 50))
    sampling = request_for(PROMPT, 20).sampling._replace(logit_bias=((3, -100.0),))
    assert len((await complete(own_engine, replace(request_for(PROMPT, 20), sampling=sampling))).ids) == 20


async def test_closing_ends_requests_and_the_thread(folder: Path) -> None:
    engine = TransformersEngine(Settings(engine_arg=("cache_mb=1",)), folder)
    await engine.start()
    before = threading.active_count()
    reply, chunks = await begun(engine, 1900)
    await engine.pause(PauseMode.IN_PLACE)
    await engine.close()
    await read_rest(reply, chunks)
    assert reply.finish is FinishReason.ABORT
    assert threading.active_count() < before
    with pytest.raises(EngineFailed, match="closed"):
        await complete(engine, request_for(PROMPT, 5))


def cache_bytes(engine: TransformersEngine) -> int:
    """The bytes of memory behind keys, values and attention masks."""
    processor = engine._batch._manager.batch_processor
    tensors = [processor.cache.cache_tensor, *processor.inputs_and_outputs.attention_mask.values()]
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type != "meta")


async def test_released_memory_is_freed_and_comes_back_with_equal_logprobs(own_engine) -> None:
    request = request_for(PROMPT, 40, seed=3)
    before, held = await complete(own_engine, request), cache_bytes(own_engine)
    await own_engine.pause(PauseMode.ABORT)
    for _ in range(2):
        await own_engine.release_memory()
        assert (cache_bytes(own_engine), held > 2**20) == (0, True)
    with pytest.raises(EngineUnavailable, match="cuda_graph, kv_cache, weights"):
        await own_engine.resume()
    await own_engine.resume_memory(("kv_cache",))
    assert cache_bytes(own_engine) == held
    await own_engine.resume_memory()
    await own_engine.resume()
    after = await complete(own_engine, request)
    assert (after.ids, after.logprobs) == (before.ids, before.logprobs)


async def test_memory_that_was_not_released_is_not_resumed(own_engine) -> None:
    whole = await complete(own_engine, request_for(PROMPT, 60, temperature=0.0))
    reply, chunks = CollectedReply(), own_engine.generate(request_for(PROMPT, 60, temperature=0.0))
    reply.add(await anext(chunks))
    await own_engine.resume_memory()  # would empty the cache under a request that runs
    await read_rest(reply, chunks)
    assert (reply.ids, reply.logprobs) == (whole.ids, whole.logprobs)


@pytest.mark.parametrize("mode", first([PauseMode.ABORT, PauseMode.DRAIN]))
@pytest.mark.wide
async def test_a_request_goes_on_exactly_after_a_release(own_engine, mode: PauseMode) -> None:
    gate, request = AdminGate(own_engine), request_for(PROMPT, 300, temperature=0.0)
    whole, begins = await complete(own_engine, request), asyncio.Event()
    running = asyncio.create_task(gate.read(request, begins))
    await begins.wait()
    await gate.admin.release_memory((), mode)
    waiting = asyncio.create_task(gate.read(replace(request, request_id="waiting")))
    await gate.admin.resume_memory(("weights",))
    assert gate.state.released == {"kv_cache", "cuda_graph"} and gate.state.paused is mode and not waiting.done()
    await gate.admin.resume_memory(())
    for reply in (await running, await waiting):
        assert reply.ids == whole.ids and reply.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_weights_are_updated_while_memory_is_released(own_engine, folder: Path, other_folder: Path) -> None:
    gate, request = AdminGate(own_engine), request_for(PROMPT, 20, temperature=0.0)
    old = await gate.read(request)
    for tags, version in ((("weights",), 5), (("kv_cache",), 6)):
        await gate.admin.release_memory((), PauseMode.ABORT)
        await gate.admin.resume_memory(tags)
        await gate.admin.flush_cache()
        assert await gate.admin.update_weights(str(other_folder), version, PauseMode.ABORT) == version
        await gate.admin.resume_memory(())
        new = await gate.read(request)
        assert new.ids != old.ids and set(new.versions) == {version}
        assert new.logprobs == pytest.approx(plain_logprobs(other_folder, PROMPT, new.ids), abs=1e-4)
        await gate.admin.update_weights(str(folder), 0, PauseMode.ABORT)
    assert (await gate.read(request)).logprobs == old.logprobs


async def test_memory_that_cannot_be_taken_back_stays_released(own_engine, monkeypatch) -> None:
    import torch

    gate, request = AdminGate(own_engine), request_for(PROMPT, 20, seed=1)
    before = await gate.read(request)
    await gate.admin.release_memory((), PauseMode.ABORT)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", out_of_memory)
        with pytest.raises(EngineUnavailable, match="taken back yet: out of memory"):
            await gate.admin.resume_memory(())
    assert gate.state.paused is PauseMode.ABORT and gate.state.released == {"weights", "kv_cache", "cuda_graph"}
    await gate.admin.resume_memory(())
    assert gate.state.paused is None and (await gate.read(request)).logprobs == before.logprobs


def out_of_memory(*arguments: object, **options: object) -> None:
    raise RuntimeError("out of memory")


async def test_weights_that_do_not_fit_into_the_host_are_not_released(own_engine, monkeypatch) -> None:
    monkeypatch.setattr("proxy.engine.transformers.engine.move_to_host", out_of_memory)
    gate, request = AdminGate(own_engine), request_for(PROMPT, 20, seed=1)
    with pytest.raises(EngineUnavailable, match="host's memory: out of memory"):
        await gate.admin.release_memory((), PauseMode.ABORT)
    assert gate.state.paused is None and not gate.state.released
    assert len((await gate.read(request)).ids) == 20 and cache_bytes(own_engine) > 0


async def test_closing_while_memory_is_released_ends_requests_and_the_thread(folder: Path) -> None:
    engine = TransformersEngine(Settings(engine_arg=("cache_mb=1",)), folder)
    await engine.start()
    before = threading.active_count()
    reply, chunks = await begun(engine, 1900)
    await engine.pause(PauseMode.IN_PLACE)
    await engine.release_memory()
    await engine.close()
    await read_rest(reply, chunks)
    assert reply.finish is FinishReason.ABORT and threading.active_count() < before
    with pytest.raises(EngineFailed, match="closed"):
        await engine.resume_memory()


async def test_a_folder_without_a_model_is_a_configuration_error(tmp_path: Path) -> None:
    engine = TransformersEngine(Settings(), tmp_path)
    with pytest.raises(ConfigurationError, match="not a Hugging Face model folder"):
        await engine.start()
    await engine.close()


def test_an_unknown_engine_argument_is_a_configuration_error(tmp_path: Path) -> None:
    for argument in ("speed=9", "threads=many", "cache_mb=0"):
        with pytest.raises(ConfigurationError, match=argument.partition("=")[0]):
            TransformersEngine(Settings(engine_arg=(argument,)), tmp_path)
