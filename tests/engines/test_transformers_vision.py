"""The transformers engine with models that see: logprobs equal a plain forward pass of the model with all pixels."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.contract import CHECKS, CollectedReply, ContractCheck, check_images_are_seen, complete
from proxy.engine.interface import AdapterSource, Capability, PauseMode
from proxy.engine.tiny.vision import VisionKind, build_tiny_vision_model
from proxy.engine.transformers import sight
from proxy.engine.transformers.engine import TransformersEngine
from proxy.images.prompt_images import PromptImages
from proxy.settings import Settings
from proxy.types import ImageFile, PlacedImage, ids_of
from tests.adapters import adapted_model, write_adapter
from tests.engines.gates import AdminGate
from tests.engines.seeing import Seen, check_blind_differs, check_exact, plain_logprobs, seen
from tests.vision import KINDS, image_file
from tests.wide import CROSSED
from tokengrove.errors import EngineFailed, InvalidRequest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

TEXT, MORE, LAST = range(40, 60), range(60, 90), range(90, 99)
LARGE = image_file(128, 128, 9)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, vision_folders: dict[str, Path]) -> Path:
    return vision_folders[request.param]


@pytest.fixture(scope="module")
def other_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same model; its vision part is another too."""
    path = tmp_path_factory.mktemp("other")
    build_tiny_vision_model(path, VisionKind(KINDS[0] if "2_5" in str(folder) else KINDS[1]), seed=1)
    return path


def started(folder: Path, *engine_arg: str) -> TransformersEngine:
    engine = TransformersEngine(Settings(model=str(folder), engine_arg=engine_arg), folder)
    asyncio.run(engine.start())
    return engine


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = started(folder)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def own_engine(folder: Path) -> Iterator[TransformersEngine]:
    """An engine for one test to change. A step has 8 tokens, fewer than an image."""
    engine = started(folder, "batch_tokens=8", "cache_mb=4")
    yield engine
    asyncio.run(engine.close())


def of(folder: Path, *parts: object) -> Seen:
    return seen(folder, *parts)  # type: ignore[arg-type]


def test_it_says_that_the_model_sees(engine: TransformersEngine) -> None:
    info = engine.info()
    assert info.capabilities == frozenset(Capability) and info.detail.endswith("sees images")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.engines
async def test_contract_of_texts(engine: TransformersEngine, check: ContractCheck) -> None:
    await check(engine, ids_of(TEXT))


@CROSSED
@pytest.mark.parametrize(
    ("temperature", "parts"),
    [
        pytest.param(0.0, (TEXT, image_file(100, 60), MORE), id="one, greedy"),
        pytest.param(0.7, (image_file(), TEXT), id="first, cold", marks=pytest.mark.engines),
        pytest.param(1.5, (TEXT, image_file(64, 64, 1)), id="last, hot", marks=pytest.mark.engines),
        pytest.param(
            *(1.0, (TEXT, image_file(200, 200, 1), MORE, image_file(60, 300, 2), image_file(40, 40, 3), LAST)),
            id="several sizes",
        ),
        pytest.param(
            *(1.0, (image_file(60, 60, 1), image_file(60, 60, 1), TEXT, image_file(60, 60, 1), LAST)),
            id="one thrice",
            marks=pytest.mark.engines,
        ),
        pytest.param(1.0, (TEXT,), id="none"),
    ],
)
async def test_logprobs_are_those_of_a_plain_forward_pass(
    engine: TransformersEngine, folder: Path, parts: Sequence[object], temperature: float
) -> None:
    prompt = of(folder, *parts)
    reply = await complete(engine, prompt.request(12, temperature))
    check_exact(folder, prompt, reply, temperature)
    if prompt.files:
        check_blind_differs(folder, prompt, reply)


async def test_later_turns_take_earlier_images_from_the_prefix_cache(engine: TransformersEngine, folder: Path) -> None:
    prompt, known = of(folder, range(100, 140), image_file(150, 90, 7), MORE), 0
    for turn in range(4):
        chunks = [chunk async for chunk in engine.generate(prompt.request(9))]
        reply = CollectedReply()
        for chunk in chunks:
            reply.add(chunk)
        check_exact(folder, prompt, reply)
        assert chunks[0].cached_tokens is not None and chunks[0].cached_tokens >= known
        known = (len(prompt.ids) + len(reply.ids) - 1) // 32 * 32
        prompt = prompt.then(folder, reply.ids, LAST, image_file(90 + turn, 90, turn), MORE)


@pytest.mark.engines
async def test_adapters_see_images_in_one_batch_and_share_no_prefix(
    own_engine: TransformersEngine, folder: Path, tmp_path: Path
) -> None:
    adapters: dict[int | None, Path | None] = {None: None}
    for version in (1, 2):
        adapters[version] = write_adapter(folder, tmp_path / str(version), version)
        await own_engine.load_adapter(version, AdapterSource(str(adapters[version])))
    prompt = of(folder, range(200, 240), image_file(120, 120, 1), MORE)
    for _ in range(2):  # the second time all of them are in the cache
        requests = [replace(prompt.request(8), adapter=version) for version in adapters]
        replies = await asyncio.gather(*(complete(own_engine, request) for request in requests))
        for (version, adapter), reply in zip(adapters.items(), replies, strict=True):
            expected = plain_logprobs(folder, prompt, reply.ids, adapted=adapted_model(folder, adapter))
            assert reply.logprobs == pytest.approx(expected, abs=1e-4) and set(reply.versions) == {version or 0}


@pytest.mark.engines
async def test_equal_texts_with_other_images_share_no_key(engine: TransformersEngine, folder: Path) -> None:
    prompts = [of(folder, range(200, 240), image_file(120, 120, seed), MORE) for seed in (1, 2, 3, 1)]
    assert len({bytes(prompt.ids) for prompt in prompts}) == 1
    for _ in range(2):  # the second time all of them are in the cache
        replies = await asyncio.gather(*(complete(engine, prompt.request(10)) for prompt in prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            check_exact(folder, prompt, reply)


@pytest.mark.engines
async def test_images_longer_than_a_step_are_seen_as_a_whole(own_engine: TransformersEngine, folder: Path) -> None:
    prompts = [
        of(folder, TEXT, image_file(200, 150, 1), MORE, image_file(90, 200, 2)),
        of(folder, image_file(220, 220, 3), LAST),
        of(folder, MORE),
    ]
    replies = await asyncio.gather(*(complete(own_engine, prompt.request(6)) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        check_exact(folder, prompt, reply)


@pytest.mark.engines
@pytest.mark.parametrize("mode", PauseMode)
async def test_an_update_mid_reply_shows_images_to_the_new_weights(
    own_engine: TransformersEngine, folder: Path, other_folder: Path, mode: PauseMode
) -> None:
    gate, begun = AdminGate(own_engine), asyncio.Event()
    prompt = of(folder, TEXT, image_file(100, 100, 4), MORE)
    reading = asyncio.create_task(gate.read(prompt.request(120), begun))
    await begun.wait()
    await gate.admin.update_weights(str(other_folder), 1, mode)
    reply = await reading
    check_exact({0: folder, 1: other_folder}, prompt, reply)
    assert set(reply.versions) == ({0} if mode is PauseMode.DRAIN else {0, 1})
    again = await gate.read(prompt.request(6))
    check_exact({1: other_folder}, prompt, again)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_placeholders_are_never_sampled_and_keep_their_share(
    engine: TransformersEngine, folder: Path, temperature: float
) -> None:
    prompt = of(folder, TEXT, image_file(64, 64, 1), LAST)
    image = prompt.ids[prompt.placed[0].start]
    # The bias leaves next to nothing for other tokens: their logprobs are low, since the distribution is the whole one.
    reply = await complete(engine, prompt.request(8, temperature, logit_bias=((image, 60.0),)))
    assert len(reply.ids) == 8 and image not in reply.ids
    assert all(value < -40 for value in reply.logprobs)


@pytest.mark.engines
async def test_a_seed_samples_the_same_tokens_with_images_whatever_else_runs(
    engine: TransformersEngine, folder: Path
) -> None:
    prompt = of(folder, TEXT, image_file(80, 80, 5), MORE)
    alone = await complete(engine, prompt.request(12, seed=3))
    crowd = [of(folder, MORE, image_file(90, 50, seed), TEXT).request(12) for seed in range(4)]
    among, *_ = await asyncio.gather(
        complete(engine, prompt.request(12, seed=3)), *(complete(engine, r) for r in crowd)
    )
    assert among.ids == alone.ids


@pytest.mark.engines
async def test_memory_released_mid_reply_comes_back_with_images(own_engine: TransformersEngine, folder: Path) -> None:
    gate, begun = AdminGate(own_engine), asyncio.Event()
    prompt = of(folder, TEXT, image_file(100, 100, 4), MORE)
    reading = asyncio.create_task(gate.read(prompt.request(40), begun))
    await begun.wait()
    await gate.admin.release_memory((), PauseMode.ABORT)
    await gate.admin.resume_memory(())
    check_exact(folder, prompt, await reading)


@pytest.mark.engines
async def test_flushing_the_cache_mid_reply_keeps_images(own_engine: TransformersEngine, folder: Path) -> None:
    gate, begun = AdminGate(own_engine), asyncio.Event()
    prompt = of(folder, TEXT, image_file(100, 100, 4), MORE)
    reading = asyncio.create_task(gate.read(prompt.request(40), begun))
    await begun.wait()
    await own_engine.flush_cache()
    check_exact(folder, prompt, await reading)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda p: p._replace(ids=p.ids[:-1] + p.ids[p.placed[0].start :][:1]), "image placeholders"),
        (lambda p: p._replace(placed=(), files=()), "the images of the request take 0"),
        (lambda p: p._replace(placed=(p.placed[0]._replace(length=3),)), "takes 4 tokens in this model"),
        (lambda p: p._replace(placed=(p.placed[0]._replace(start=2),)), "has 0 placeholders among"),
        (
            lambda p: p._replace(files=(LARGE,), placed=(p.placed[0]._replace(digest=LARGE.digest),)),
            "takes (16|25) tokens in this model",
        ),
    ],
    ids=["a stray one", "no image", "a shorter span", "a span elsewhere", "a larger image"],
)
async def test_placeholders_that_do_not_fit_the_images_are_refused(
    engine: TransformersEngine, folder: Path, changed: Callable[[Seen], Seen], message: str
) -> None:
    prompt = changed(of(folder, TEXT, image_file(64, 64, 1), MORE))
    with pytest.raises(InvalidRequest, match=message) as refused:
        await complete(engine, prompt.request())
    assert refused.value.param == "input_ids" and len(str(refused.value)) < 300


async def test_an_image_that_cannot_be_shown_fails_its_own_requests_only(
    own_engine: TransformersEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = (of(folder, TEXT, image_file(64, 64, seed), MORE) for seed in (1, 2))
    text = of(folder, TEXT)
    model = own_engine._model
    shown = model.get_image_features
    calls = iter(range(100))

    def failing(**given: object) -> object:
        if next(calls) == 0:
            raise RuntimeError("out of memory")
        return shown(**given)

    monkeypatch.setattr(model, "get_image_features", failing)
    with pytest.raises(EngineFailed, match=f"could not see the image {bad.files[0].digest}: out of memory"):
        await complete(own_engine, bad.request())
    for prompt in (good, text, bad):  # what was computed without the image is used by nobody
        check_exact(folder, prompt, await complete(own_engine, prompt.request()))


@pytest.mark.engines
async def test_what_requests_leave_behind_that_are_aborted_early_is_exact(
    own_engine: TransformersEngine, folder: Path
) -> None:
    prompt = of(folder, TEXT, image_file(220, 220, 1), MORE)
    for steps in range(6):
        request = prompt.request(2)
        reading = asyncio.create_task(complete(own_engine, request))
        for _ in range(steps * 3):
            await asyncio.sleep(0.001)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        check_exact(folder, prompt, await complete(own_engine, prompt.request(4)))
        await own_engine.flush_cache()


async def test_only_new_images_are_read_and_evicted_ones_again(
    own_engine: TransformersEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    plain = PromptImages.read

    async def counting(self: PromptImages, some: Sequence[PlacedImage] | None = None) -> list[ImageFile]:
        read.extend(placed.digest for placed in some or self.placed)
        return await plain(self, some)

    monkeypatch.setattr(PromptImages, "read", counting)
    first, second = image_file(64, 64, 1), image_file(90, 64, 2)
    prompt = of(folder, TEXT, first, MORE)
    reply = await complete(own_engine, prompt.request(4))
    after = prompt.then(folder, reply.ids, second, LAST)
    check_exact(folder, after, await complete(own_engine, after.request(4)))
    assert read == [first.digest, second.digest]
    sight, batch = own_engine._sight, own_engine._batch
    assert sight is not None and batch is not None and sight.images.held_bytes > 0
    # Keys, values and features are gone without an update, as if other requests had taken their room.
    await own_engine._on_control(lambda: own_engine._while_paused(lambda: (batch.forget(), sight.images.forget())[0]))
    assert sight.images.held_bytes == 0
    check_exact(folder, after, await complete(own_engine, after.request(4)))
    assert read == [first.digest, second.digest] * 2


@pytest.mark.engines
async def test_features_are_bounded(folder: Path) -> None:
    engine = TransformersEngine(Settings(model=str(folder), engine_arg=("image_cache_mb=1", "batch_tokens=8")), folder)
    await engine.start()
    assert engine._sight is not None
    images = engine._sight.images
    images._most_bytes = 5000  # about one of the images below: each step drops those of the other request
    prompts = [of(folder, TEXT, image_file(100, 100, seed), image_file(64, 64, seed), MORE) for seed in range(2)]
    replies = await asyncio.gather(*(complete(engine, prompt.request(4)) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        check_exact(folder, prompt, reply)
    largest = max(features.bytes for features in images._features.values())
    assert images.held_bytes == sum(features.bytes for features in images._features.values())
    assert images.held_bytes <= max(5000, largest)
    await engine.close()


async def test_contract_of_images(engine: TransformersEngine, folder: Path) -> None:
    prompt, other = (of(folder, TEXT, image_file(64, 64, seed), MORE) for seed in (1, 2))
    await check_images_are_seen(engine, prompt.ids, prompt.images, other.images)


@pytest.mark.engines
async def test_a_model_that_lost_its_processor_answers_texts(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoImageProcessor"}', "utf-8")
    engine = TransformersEngine(Settings(model=str(tmp_path)), tmp_path)
    await engine.start()
    info = engine.info()
    assert Capability.IMAGES not in info.capabilities and "cannot be loaded" in info.detail
    prompt = of(folder, TEXT)
    check_exact(folder, prompt, await complete(engine, prompt.request()))
    await engine.close()


def test_prompts_with_large_images_are_prepared_one_at_a_time(
    engine: TransformersEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, prepare = list[str](), sight.see

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return prepare(*arguments)

    monkeypatch.setattr(sight, "see", noted)
    monkeypatch.setattr(sight, "_LARGE_PIXELS", 100 * 100)
    large = [seen(folder, TEXT, image_file(101, 100, seed)) for seed in range(80, 83)]
    small = seen(folder, TEXT, image_file(100, 100, 83))

    async def all_at_once() -> list[CollectedReply]:
        return await asyncio.gather(*[complete(engine, prompt.request(2)) for prompt in (*large, small)])

    replies = asyncio.run(all_at_once())
    assert [len(reply.ids) for reply in replies] == [2] * 4
    assert sorted(threads)[-3:] == ["tokengrove-large-images_0"] * 3
    assert not sorted(threads)[0].startswith("tokengrove")
