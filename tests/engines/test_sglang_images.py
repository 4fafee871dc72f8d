"""The real SGLang, embedded, with tiny models that see: the ids it runs on, the logprobs, its cache, and updates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from proxy.engine.contract import CollectedReply, complete, request_for
from proxy.engine.interface import Capability, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.sglang.engine import SglangEngine
from proxy.engine.tiny.vision import VisionKind, build_tiny_vision_model
from proxy.settings import Settings
from proxy.types import ids_of
from tests.engines.devices import CPU_ARGUMENTS
from tests.engines.gates import AdminGate
from tests.engines.pictures import Prompts, asks, drawn, seen_logprobs
from tokengrove.reasons import FinishReason

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

TOLERANCE = 1e-3
RED, BLUE = drawn(1), drawn(2)
WIDE = drawn(3, 300, 80)


@pytest.fixture(scope="module", params=list(VisionKind))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one kind with other weights."""
    made = [tmp_path_factory.mktemp(f"{request.param}-{seed}") for seed in range(2)]
    for seed, folder in enumerate(made):
        build_tiny_vision_model(folder, request.param, seed=seed)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folders: list[Path]) -> AsyncIterator[SglangEngine]:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    started = SglangEngine(Settings(engine_arg=CPU_ARGUMENTS), folders[0])
    await started.start()
    yield started
    await started.close()


@pytest.fixture(scope="module")
def prompts(folders: list[Path]) -> Prompts:
    return Prompts(folders[0])


async def cached(engine: SglangEngine, request: GenerateRequest) -> tuple[CollectedReply, int]:
    """The reply, and how many tokens of the prompt were in SGLang's cache."""
    reply, told = CollectedReply(), [0]
    async for chunk in engine.generate(request):
        reply.add(chunk)
        told.append(chunk.cached_tokens or 0)
    return reply, max(told)


async def test_it_sees_and_samples_from_what_a_plain_forward_pass_gives(engine, prompts, folders) -> None:
    assert Capability.IMAGES in engine.info().capabilities
    ids, placed = prompts.of("Look: ", RED, " and then ", WIDE, " What is it?")
    reply = await complete(engine, asks(ids, placed, (RED, WIDE), 24))
    assert len(reply.ids) == 24
    assert reply.logprobs == pytest.approx(seen_logprobs(folders[0], ids, (RED, WIDE), reply.ids), abs=TOLERANCE)
    others = seen_logprobs(folders[0], ids, (BLUE, WIDE), reply.ids)
    assert max(abs(one - other) for one, other in zip(reply.logprobs, others, strict=True)) > 0.01


async def test_ids_that_no_tokenizer_would_write_stay_as_they_are(engine, prompts, folders) -> None:
    """A text's ids come from sampling, so encoding the text anew may give others: SGLang must not do that."""
    spelled = ids_of()
    for letter in "hello there, what is in the picture?":
        spelled += prompts.of(letter)[0]
    assert spelled != prompts.of("hello there, what is in the picture?")[0]
    ids, placed = prompts.of(RED)
    ids += spelled
    reply = await complete(engine, asks(ids, placed, (RED,), 16))
    assert reply.logprobs == pytest.approx(seen_logprobs(folders[0], ids, (RED,), reply.ids), abs=TOLERANCE)


async def test_a_further_turn_uses_the_cache_of_the_turn_before(engine, prompts, folders) -> None:
    await engine.flush_cache()
    ids, placed = prompts.of("One: ", RED, " then?")
    first, before = await cached(engine, asks(ids, placed, (RED,), 12))
    assert not before
    more, later = prompts.of(" Two: ", BLUE, " now?")
    longer = ids + ids_of(first.ids) + more
    moved = tuple(image._replace(start=image.start + len(ids) + 12) for image in later)
    second, shared = await cached(engine, asks(longer, placed + moved, (RED, BLUE), 12))
    assert shared >= len(ids)
    assert second.logprobs == pytest.approx(seen_logprobs(folders[0], longer, (RED, BLUE), second.ids), abs=TOLERANCE)


async def test_equal_texts_with_other_images_do_not_share_the_cache(engine, prompts, folders) -> None:
    await engine.flush_cache()
    ids, placed = prompts.of("Look: ", RED, " What is it?")
    swapped = tuple(image._replace(digest=BLUE.digest) for image in placed)
    one, other = await asyncio.gather(
        complete(engine, asks(ids, placed, (RED,), 16)), complete(engine, asks(ids, swapped, (BLUE,), 16))
    )
    again, shared = await cached(engine, asks(ids, swapped, (BLUE,), 16))
    assert one.logprobs == pytest.approx(seen_logprobs(folders[0], ids, (RED,), one.ids), abs=TOLERANCE)
    for reply in (other, again):
        assert reply.logprobs == pytest.approx(seen_logprobs(folders[0], ids, (BLUE,), reply.ids), abs=TOLERANCE)
    assert shared > placed[0].start


async def test_a_turn_without_images_runs_beside_them(engine, prompts) -> None:
    ids, placed = prompts.of("Look: ", RED)
    seen, text = await asyncio.gather(
        complete(engine, asks(ids, placed, (RED,), 8)), complete(engine, request_for(ids_of(range(40, 60)), 8))
    )
    assert len(seen.ids) == len(text.ids) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
async def test_placeholders_are_never_sampled_and_logprobs_are_of_the_whole_distribution(
    engine, prompts, folders, temperature: float
) -> None:
    ids, placed = prompts.of("Look: ", RED)
    banned = {ids[placed[0].start]}
    request = asks(ids, placed, (RED,), 200, temperature=temperature)
    reply = await complete(engine, request)
    assert not banned & set(reply.ids)
    if temperature == 1.0:
        expected = seen_logprobs(folders[0], ids, (RED,), reply.ids)
        assert reply.logprobs == pytest.approx(expected, abs=1e-4)  # one of 640 tokens takes 1e-3 or more


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_images_stay_through_a_weight_update(engine, prompts, folders, mode: PauseMode) -> None:
    gate = AdminGate(engine)
    ids, placed = prompts.of("Look: ", RED, " and ", WIDE, " What?")
    begun = [asyncio.Event() for _ in range(4)]
    running = [asyncio.create_task(gate.read(asks(ids, placed, (RED, WIDE), 200), event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    await gate.admin.update_weights(str(folders[1]), 1, mode)
    for reply in await asyncio.gather(*running):
        assert len(reply.ids) == 200 and set(reply.versions) == {0, 1}
        if mode is not PauseMode.IN_PLACE:  # else the tokens after it stand on keys of the old weights
            by_version = [seen_logprobs(folder, ids, (RED, WIDE), reply.ids) for folder in folders]
            expected = [by_version[version][at] for at, version in enumerate(reply.versions)]
            assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)
    await gate.admin.update_weights(str(folders[0]), 0, PauseMode.DRAIN)


async def test_an_aborted_request_ends_while_its_images_are_made_and_later(engine, prompts) -> None:
    ids, placed = prompts.of("Look: ", RED)
    request = asks(ids, placed, (drawn(1),), 1000)
    chunks = engine.generate(request)
    first = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)  # the generator starts the task that samples
    await asyncio.sleep(0)  # and that task begins with the images
    await engine.abort(request.request_id)
    assert (await first).finish is FinishReason.ABORT
    await chunks.aclose()
    request = asks(ids, placed, (RED,), 1000)
    async for chunk in engine.generate(request):
        if chunk.ids:
            await engine.abort(request.request_id)
        last = chunk
    assert last.finish is FinishReason.ABORT


async def test_several_answers_to_one_prompt(engine, prompts, folders) -> None:
    ids, placed = prompts.of("Look: ", BLUE, " What?")
    replies = await asyncio.gather(*(complete(engine, asks(ids, placed, (BLUE,), 8)) for _ in range(6)))
    for reply in replies:
        assert reply.logprobs == pytest.approx(seen_logprobs(folders[0], ids, (BLUE,), reply.ids), abs=TOLERANCE)
